"""Chains inside chains: branches that hold their results while others compute keep them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_each
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Carry,
    Chain,
    ClipNorm,
    ClipValue,
    ClipValueByEMA,
    Graft,
    Group,
    Identity,
    Lambda,
    Lion,
    Masked,
    Modular,
    Momentum,
    Orthogonalize,
    Parallel,
    Partition,
    Rows,
    Scale,
    Shampoo,
    Sign,
    State,
    Steepest,
    TensorList,
    Transform,
    named,
)
from torchzero_clip.engines import AT_ONCE, Compiled

STEPS = 4  # the last two are replayed if the chain is pure
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


def half_of_sum(lists: Mapping[str, TensorList]) -> TensorList:
    return lists["a"].add(lists["b"]).mul(0.5)


def sum_in_place(lists: Mapping[str, TensorList]) -> TensorList:
    return lists["a"].add_(lists["b"])


class DifferenceOfTensors(Transform):
    """2 u - 3 u, of tensors that are held while other lists are made."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        twice, thrice = u.mul(2.0).tensors, u.mul(3.0).tensors
        return TensorList([a - b for a, b in zip(twice, thrice, strict=True)])


class SumsOfViews(Transform):
    """3 u - the sum of what is left of 2 u without its first row, of views that are held."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        views = [t[1:] for t in u.mul(2.0).tensors]
        other = u.mul(3.0).tensors
        return TensorList([t - view.sum() for t, view in zip(other, views, strict=True)])


class TakesTensors(Transform):
    """Take tensors of lists, and look at them or write them next to methods of these lists."""

    how: str

    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u, mean = u.mul(1.0), state["mean"]
        taken, means = u.tensors, mean.tensors
        mean.lerp_(u, 0.5)
        if self.how == "looks after a method":
            u.mul_(2.0)
            return TensorList([t + m for t, m in zip(taken, means, strict=True)])
        twice = u.mul(2.0)
        for t, m in zip(taken, means, strict=True):
            t.zero_()
            m.mul_(0.5)
        return twice.add_(mean).add_(u)


WRITES = {"Rows": lambda: Rows(1.0, Orthogonalize()), "Shampoo": Shampoo}
"""Rules that write the memory of their update."""
READS = {
    "Orthogonalize": Orthogonalize,
    "EMA": lambda: EMA(0.9),
    "ClipNorm": lambda: ClipNorm(0.1),
    "Momentum": Momentum,
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first row": lambda u: u[:1].expand_as(u),
    "the last row": lambda u: u[-1:].expand_as(u),
    "the last entry": lambda u: u.flatten()[-1].expand_as(u),
    "the same memory": lambda u: u.view(-1).view(u.shape),
}


def nested() -> Iterator[tuple[str, Callable[[], list[Transform]]]]:
    """Combinators in combinators, whose branches write memory that others share or span."""
    for (a, one), (b, other) in itertools.product(WRITES.items(), READS.items()):

        def inner(one: Any = one) -> Transform:
            return Parallel({"a": one(), "b": Identity()}, sum_in_place)

        name = f"Parallel({a}, Identity), {b}"
        yield (
            f"ClipValue, Parallel({name})",
            lambda inner=inner, other=other: [
                ClipValue(0.5),
                Parallel({"a": inner(), "b": other()}, half_of_sum),
            ],
        )
        yield (
            f"ClipValue, Graft({name})",
            lambda inner=inner, other=other: [ClipValue(0.5), Graft(inner(), other())],
        )
        yield (
            f"ClipValue, Steepest({name})",
            lambda inner=inner, other=other: [
                ClipValue(0.5),
                Steepest(Parallel({"a": inner(), "b": other()}, half_of_sum)),
            ],
        )
    for name, view in VIEWS.items():
        yield (
            f"Parallel({name}, ClipNorm)",
            lambda view=view: [
                Parallel(
                    {"a": Chain(Scale(0.5), Lambda(view)), "b": Chain(Scale(3.0), ClipNorm(0.1))},
                    sum_in_place,
                )
            ],
        )
    yield "tensors that are held", lambda: [Scale(2.0), DifferenceOfTensors()]
    for how in ("looks after a method", "writes after a method"):
        yield how, lambda how=how: [Scale(2.0), TakesTensors(how)]
    yield "views that are held", lambda: [Scale(2.0), SumsOfViews()]


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
NESTED = dict(nested())
INNERS = list(INNER)
SLOW = {
    f"Graft({a}, {b})"
    for (i, a), (j, b) in itertools.product(enumerate(INNERS), enumerate(INNERS))
    if (j - i) % len(INNERS) not in (1, 3)
}
"""Pairs of links that slow tests have: quick ones have each link twice in each place."""
SLOW |= {
    f"ClipValue, {outer}(Parallel({a}, Identity), {b})"
    for outer, a, b in itertools.product(("Graft", "Steepest"), WRITES, READS)
    if (list(WRITES).index(a) + list(READS).index(b) + (outer == "Graft")) % 2
}


def split(chains: Mapping[str, Any]) -> list[Any]:
    """Return the names of chains as two lists, the second of which is slow."""
    quick = [name for name in chains if name not in SLOW]
    slow = [name for name in chains if name in SLOW]
    return [
        pytest.param(quick, id="quick"),
        pytest.param(slow, id="slow", marks=pytest.mark.slow),
    ]


MATRICES = [(3, 4), (4, 4), (4, 2)]


def weights(
    make: Callable[[], list[Transform]], engine: str, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Tensor:
    """The weights after some steps, each with gradients in memory of its own."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    links = make()
    links += [] if isinstance(links[-1], Chain) else [LR(0.1)]
    pairs = [(f"layer.{i}", p) for i, p in enumerate(params)]
    opt = Modular(pairs, *links, compile=engine == "compiled", fused=engine != "plain")
    if engine == "oracle":
        opt.engine = AT_ONCE  # every list has memory of its own
    if isinstance(opt.engine, Compiled):
        opt.engine.backend = "plain"  # the same lists and memory, without a compiler
    kept = []  # so that no gradient lies where an older one did
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=random)
            kept.append(p.grad)
        opt.step()
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("names", split(CHAINS))
def test_branches_do_not_write_over_each_other(names: list[str]) -> None:
    run_each(lambda name: holds(CHAINS[name], SHAPES), "name", names)


@pytest.mark.parametrize("names", split(NESTED))
def test_nested_branches_keep_memory_that_others_share_or_span(names: list[str]) -> None:
    run_each(lambda name: holds(NESTED[name], MATRICES), "name", names)


def holds(make: Callable[[], list[Transform]], shapes: Sequence[tuple[int, ...]]) -> None:
    """Check that each engine has the weights of lists that share no memory."""
    wanted = weights(make, "oracle", shapes)
    for engine in ("default", "plain", "compiled"):
        found = weights(make, engine, shapes)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=engine)
