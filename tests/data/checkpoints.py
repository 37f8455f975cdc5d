"""Checkpoints as released code wrote them, which every later release has to load.

`python -m tests.data.checkpoints FILE` writes them with the code that is there. The file that lies
beside this script is never written again; a later release adds one of its own.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    Adam,
    AdaptiveClip,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Clipper,
    ClipValue,
    ClipValueByEMA,
    Guard,
    Lion,
    Masked,
    Modular,
    Momentum,
    Partition,
    Quantile,
    RMSprop,
    Scale,
    Warmup,
    WeightDecay,
    ZClip,
)

SHAPES = {"a.weight": (5, 4), "a.bias": (4,), "b.weight": (4, 3)}
BEFORE, AFTER = 5, 3  # steps; the fifth leaves Accumulate(4) at its first batch

Named = dict[str, Parameter]


def model(dtype: torch.dtype) -> Named:
    """Parameters whose values need no rounding in any dtype."""
    return {
        name: Parameter(
            (torch.arange(torch.Size(shape).numel()) % 7 / 8 - 0.25).view(shape).to(dtype)
        )
        for name, shape in SHAPES.items()
    }


def is_weight(name: str, p: Tensor) -> bool:
    return name.endswith("weight")


def kind(name: str, p: Tensor) -> str:
    return "matrix" if p.dim() == 2 else "other"


def one_group(*links: Any, **settings: Any) -> Callable[[Named], Modular]:
    return lambda params: Modular(params.items(), *links, fused=False, **settings)


def two_groups(*links: Any, **overrides: Any) -> Callable[[Named], Modular]:
    def make(params: Named) -> Modular:
        pairs = list(params.items())
        groups = [{"params": pairs[:2]}, {"params": pairs[2:], **overrides}]
        return Modular(groups, *links, fused=False)

    return make


HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
CHAINS: dict[str, tuple[torch.dtype, Callable[[Named], Modular]]] = {
    "adam": (SINGLE, one_group(ClipNorm(0.5, dim="global"), Adam(), LR(0.01))),
    "amsgrad": (SINGLE, one_group(Adam(amsgrad=True), WeightDecay(0.1), LR(0.01))),
    "double": (DOUBLE, one_group(ClipNormGrowth(mul=1.1), Adam(), LR(0.01))),
    "norm ema": (SINGLE, one_group(ClipNormByEMA(), LR(0.01))),
    "value ema": (SINGLE, one_group(ClipValueByEMA(ema_tfm=Chain(EMA(0.5), Scale(2.0))), LR(0.01))),
    "layers": (SINGLE, one_group(ZClip(dim="layer", warmup_steps=2), LR(0.01))),
    "window": (SINGLE, one_group(AdaptiveClip(Quantile(0.5, window=8)), LR(0.01))),
    "masked": (
        SINGLE,
        one_group(Masked(Momentum(0.5), is_weight), ClipNorm(0.5, name="cut"), LR(0.01)),
    ),
    "partition": (
        SINGLE,
        one_group(
            Partition({"matrix": Chain(ClipNormGrowth(), Lion()), "other": RMSprop()}, kind),
            LR(0.01),
        ),
    ),
    "nesterov": (SINGLE, one_group(ClipValue(0.5), Momentum(nesterov=True), LR(0.01), Warmup(4))),
    "kahan": (HALF, one_group(Adam(), LR(0.01), rounding="kahan")),
    "stochastic": (HALF, one_group(ClipNorm(0.5), Momentum(), LR(0.001), rounding="stochastic")),
    "accumulate": (SINGLE, one_group(Guard(), Accumulate(4), ClipNorm(0.5), Adam(), LR(0.01))),
    "two groups": (
        SINGLE,
        two_groups(ClipNormGrowth(dim="group"), ZClip(warmup_steps=2), Adam(), LR(0.01), lr=0.1),
    ),
    "clipper": (SINGLE, lambda params: Clipper(params.items(), ZClip(warmup_steps=2))),
}


def train(params: Named, opt: Modular, steps: range) -> None:
    """Steps with gradients of their own; one parameter has none now and then."""
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for name, p in params.items():
            noise = torch.rand(p.shape, generator=generator, dtype=torch.float64) * 2 - 1
            missing = name == "b.weight" and i % 4 == 1
            p.grad = None if missing else (noise * (1 + i % 3)).to(p.dtype)
        opt.step()
        if type(opt) is Clipper:
            for p in params.values():
                if p.grad is not None:
                    p.data.sub_(p.grad)


def flat(params: Named) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params.values()])


def here() -> str:
    """What the last bit of a sum or a fused product may hang on."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def recorded(name: str) -> dict[str, Any]:
    """One run: the parameters and the state dict after some steps, the parameters after more."""
    dtype, make = CHAINS[name]
    params = model(dtype)
    opt = make(params)
    train(params, opt, range(BEFORE))
    before = {"params": flat(params), "state": opt.state_dict()}
    saved = Path(sys.argv[1]).with_suffix(".one")
    torch.save(before, saved)
    before = torch.load(saved, weights_only=True)
    saved.unlink()
    train(params, opt, range(BEFORE, BEFORE + AFTER))
    return {**before, "after": flat(params)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {name: recorded(name) for name in CHAINS}
    torch.save({"machine": here(), "runs": runs}, sys.argv[1])
