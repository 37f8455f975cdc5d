"""Chains inside chains: branches that hold their results while others compute keep them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    Carry,
    Chain,
    ClipNorm,
    ClipValueByEMA,
    Graft,
    Lion,
    Masked,
    Modular,
    Parallel,
    Partition,
    Scale,
    Sign,
    Steepest,
    TensorList,
    Transform,
    named,
)
from torchzero_clip.engines import AT_ONCE, Compiled

SHAPES = [(3, 4), (5,), (4, 2)]
INNER: dict[str, Callable[[], Transform]] = {
    "Adam": Adam,
    "Sign": Sign,
    "Scale": lambda: Scale(2.0),
    "Lion": Lion,
    "Chain": lambda: Chain(Adam(), ClipNorm(0.2)),
    "Masked": lambda: Masked(Sign(), where=lambda name, p: p.dim() == 2),
    "Partition": lambda: Partition(
        {"m": Adam(), "r": Sign()}, labels=lambda name, p: "m" if p.dim() == 2 else "r"
    ),
}


def added(lists: dict[str, TensorList]) -> TensorList:
    return lists["a"].mul_(2.0).add_(lists["b"])


def chains() -> Iterator[tuple[str, Callable[[], list[Transform]]]]:
    """Every combinator that holds lists, around every link, and pairs of them."""
    for a, one in INNER.items():
        for b, other in INNER.items():
            yield f"Graft({a}, {b})", lambda one=one, other=other: [Graft(one(), other())]
        yield f"Parallel({a}, Sign)", lambda one=one: [Parallel({"a": one(), "b": Sign()}, added)]
        yield f"Carry({a})", lambda one=one: [Carry(one())]
        yield f"Adam, Steepest({a})", lambda one=one: [Adam(), Steepest(one())]
        yield f"ClipValueByEMA({a})", lambda one=one: [ClipValueByEMA(ema_tfm=one())]
    yield "shampoo", lambda: [named("shampoo", lr=1.0)]
    yield "klsoap behind a clip", lambda: [ClipNorm(1.0), named("klsoap", lr=1.0)]


CHAINS = dict(chains())


def weights(make: Callable[[], list[Transform]], engine: str) -> Tensor:
    """The weights after four steps, each with gradients in memory of its own."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
    links = make()
    links += [] if isinstance(links[-1], Chain) else [LR(0.1)]
    pairs = [(f"layer.{i}", p) for i, p in enumerate(params)]
    opt = Modular(pairs, *links, compile=engine == "compiled", fused=engine != "plain")
    if engine == "oracle":
        opt.engine = AT_ONCE  # every list has memory of its own
    if isinstance(opt.engine, Compiled):
        opt.engine.backend = "plain"  # the same lists and memory, without a compiler
    kept = []  # so that no gradient lies where an older one did
    for step in range(4):
        random = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=random)
            kept.append(p.grad)
        opt.step()
    return torch.cat([p.detach().flatten() for p in params])


@at_once("name", CHAINS)
def test_branches_do_not_write_over_each_other(name: str) -> None:
    wanted = weights(CHAINS[name], "oracle")
    for engine in ("default", "plain", "compiled"):
        found = weights(CHAINS[name], engine)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=f"{name}, {engine}")
