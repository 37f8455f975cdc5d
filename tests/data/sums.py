"""Checkpoints of Muon and its kin from when their momentum was a sum; it is an average now.

`python -m tests.data.sums FILE` writes them with the code that is there. The file that lies beside
this script was written by the last code with sums, and is never written again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import LR, Adam, Chain, ClipNorm, Modular, Orthogonalize, Partition, named

SHAPES = {"a.weight": (5, 4), "a.bias": (4,), "b.weight": (4, 3)}
MATRICES = ("a.weight", "b.weight")
BEFORE, AFTER = 5, 3

Named = dict[str, Parameter]


def model(names: Any = MATRICES) -> Named:
    """Parameters whose values need no rounding."""
    sizes = {name: torch.Size(SHAPES[name]) for name in names}
    values = {
        n: (torch.arange(size.numel()) % 7 / 8 - 0.25).view(size) for n, size in sizes.items()
    }
    return {name: Parameter(value) for name, value in values.items()}


def kind(name: str, p: Tensor) -> str:
    return "matrix" if p.dim() == 2 else "other"


def of(chain: Callable[[], Any]) -> Callable[[Named, dict[str, Any]], Modular]:
    """Two groups, of which the second has live values of its own."""

    def make(params: Named, second: dict[str, Any]) -> Modular:
        *most, last = params.items()
        return Modular([{"params": most}, {"params": [last], **second}], chain())

    return make


def beside_adam() -> Chain:
    momentum = named("muon", momentum=0.8)[0]
    muon = Chain(momentum, Orthogonalize(scale="match_rms_adamw"))
    return Chain(ClipNorm(0.5), Partition({"matrix": muon, "other": Adam()}, kind), LR(0.01))


CHAINS: dict[str, Callable[[Named, dict[str, Any]], Modular]] = {
    "muon": of(lambda: named("muon", lr=0.01)),
    "muon without nesterov": of(lambda: named("muon", lr=0.01, nesterov=False)),
    "normuon": of(lambda: named("normuon", lr=0.01)),
    "nanochat": of(lambda: named("nanochat", lr=0.01, weight_decay=0.1)),
    "beside adam": of(beside_adam),
}


def names_of(name: str) -> Any:
    return SHAPES if name == "beside adam" else MATRICES


def train(params: Named, opt: Modular, steps: range) -> None:
    """Steps with gradients of their own; one parameter has none now and then."""
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for name, p in params.items():
            noise = torch.rand(p.shape, generator=generator) * 2 - 1
            p.grad = None if name == "a.weight" and i % 4 == 1 else noise * (1 + i % 3)
        opt.step()


def flat(params: Named) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params.values()])


def recorded(name: str) -> dict[str, Any]:
    """One run: the parameters and the state dict after some steps, the parameters after more."""
    params = model(names_of(name))
    opt = CHAINS[name](params, {"momentum": 0.7, "lr": 0.02})
    train(params, opt, range(BEFORE))
    state = {**opt.state_dict()}
    state["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in state["state"].items()}
    before = {"params": flat(params), "state": state}
    train(params, opt, range(BEFORE, BEFORE + AFTER))
    return {**before, "after": flat(params)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({name: recorded(name) for name in CHAINS}, sys.argv[1])
