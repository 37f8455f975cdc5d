"""What `test_stages.py` starts on two ranks: rules of all parameters, over stages of a pipeline.

Each rank has some of the parameters, and compares them with those of an optimizer that has all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    ClipNorm,
    ClipPercentile,
    Modular,
    Prodigy,
    Transform,
)

SHAPES = [(6, 5), (5,), (4, 5), (), (0, 3), (7, 2)]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"fused": False},
    "default": {},
    "compiled": {"compile": True},
}
CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "percentile": lambda: [ClipPercentile(70.0, dim="global"), LR(0.1)],
    "ends": lambda: [ClipPercentile(100.0, dim="global"), LR(0.1)],
    "norm of groups": lambda: [ClipNorm(0.5, dim="group"), LR(0.1)],
    "prodigy": lambda: [Prodigy(), LR(1.0)],
}


SECOND = {"percentile": 40.0, "ends": 0.0}
"""The percentile of the second group."""


def params(dtype: torch.dtype) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def groups(ps: list[Parameter], chain: str, mine: list[int]) -> list[dict[str, Any]]:
    """Two groups, of which each rank has the parameters that are its own."""
    rows: list[dict[str, Any]] = [
        {"params": [ps[i] for i in some if i in mine]} for some in ((0, 1, 2), (3, 4, 5))
    ]
    if chain in SECOND:
        rows[1]["percentile"] = SECOND[chain]
    return rows


def compared(chain: str, engine: str, dtype: torch.dtype) -> bool:
    """Whether a stage moves as the whole model does, in some steps."""
    mine = list(range(dist.get_rank(), len(SHAPES), 2))
    staged, whole = params(dtype), params(dtype)
    every = list(range(len(SHAPES)))
    more: Any = {"rounding": "nearest", **ENGINES[engine]}
    here = Modular(
        groups(staged, chain, mine), *CHAINS[chain](), process_group=dist.group.WORLD, **more
    )
    here.engine = here.engine.twin()  # which compiles nothing
    alone = Modular(groups(whole, chain, every), *CHAINS[chain](), rounding="nearest", fused=False)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(p.shape, generator=generator).to(dtype) for p in whole]
        for i, grad in enumerate(grads):
            whole[i].grad = grad.clone()
            staged[i].grad = grad.clone() if i in mine else None
        here.step()
        alone.step()
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
    for i in mine:
        torch.testing.assert_close(staged[i], whole[i], **tight)
    return True


def tagged(engine: str) -> bool:
    """Whether a tag that is set in a run is refused, since other stages do not know of it."""
    ps = params(torch.float32)
    rule = ClipNorm(0.5, dim="global")
    opt = Modular(ps, rule, LR(0.1), process_group=dist.group.WORLD, **ENGINES[engine])
    opt.engine = opt.engine.twin()
    for p in ps:
        p.grad = torch.ones_like(p)
    opt.step()
    vars(ps[1])["grad_norm_group"] = "mtp"
    try:
        opt.step()
    except ValueError as error:
        return "is not supported with process_group" in str(error)
    return False


def main() -> None:
    dist.init_process_group("gloo")
    for engine in sys.argv[1:]:
        for chain in CHAINS:
            assert compared(chain, engine, torch.float32)
            if chain in SECOND:
                assert compared(chain, engine, torch.bfloat16)
            print(f"{engine}: {chain}")
        assert tagged(engine)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
