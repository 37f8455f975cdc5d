"""Checkpoints that lack the state of a link: refused where the link has surely acted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    Adam,
    Chain,
    Freeze,
    Graft,
    Guard,
    Identity,
    InBasis,
    KLBasis,
    Kron,
    Masked,
    Modular,
    Momentum,
    Orthogonalize,
    Parallel,
    Partition,
    Reset,
    Rows,
    Shampoo,
    Sign,
    SOAPBasis,
    Steepest,
    Transform,
    When,
)

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4)}
Links = Callable[[], Sequence[Transform]]


def is_weight(name: str, p: Any) -> bool:
    return name.endswith("weight")


def first(made: Any) -> Any:
    return made["x"]


def kind(name: str, p: Any) -> str:
    return "x" if is_weight(name, p) else "y"


def rows() -> Chain:
    return Chain(EMA(0.5), Rows(0.5, Orthogonalize()))


def make(links: Links, **engine: Any) -> tuple[list[Parameter], Modular]:
    generator = torch.Generator().manual_seed(0)
    named = [(name, Parameter(torch.randn(s, generator=generator))) for name, s in SHAPES.items()]
    return [p for _, p in named], Modular(named, *links(), **engine)


def train(params: list[Parameter], opt: Modular, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step + 1)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def without(state_dict: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of a checkpoint without the state of one link; other state there must be."""
    made = copy.deepcopy(state_dict)
    removed = 0
    for held in made["state"].values():
        for key in [key for key in held if key.rpartition("/")[0] == path]:
            del held[key]
            removed += 1
    assert removed
    assert any(made["state"].values())
    return made


CHAINS: dict[str, tuple[Links, list[str]]] = {
    "soap": (
        lambda: (InBasis(SOAPBasis(), Adam()), LR(0.1)),
        ["InBasis", "InBasis/Adam", "InBasis/SOAPBasis"],
    ),
    "soap, first gradient used": (
        lambda: (InBasis(SOAPBasis(first="use"), Adam()), LR(0.1)),
        ["InBasis/Adam", "InBasis/SOAPBasis"],
    ),
    "klsoap": (
        lambda: (InBasis(KLBasis(), Adam()), LR(0.1)),
        ["InBasis/Adam", "InBasis/KLBasis"],
    ),
    "soap after a guard": (
        lambda: (Guard(), InBasis(SOAPBasis(), Adam()), LR(0.1)),
        ["InBasis", "InBasis/Adam", "InBasis/SOAPBasis"],
    ),
    "after soap": (
        lambda: (EMA(0.9), InBasis(SOAPBasis(), Adam()), Momentum(0.5), LR(0.1)),
        ["EMA", "InBasis", "InBasis/Adam", "Momentum"],
    ),
    "accumulate": (
        lambda: (Accumulate(2), Adam(), LR(0.1)),
        ["Accumulate", "Adam"],
    ),
    "accumulate, in its second large batch": (
        lambda: (Accumulate(3), Adam(), LR(0.1)),
        ["Accumulate", "Adam"],
    ),
    "kron": (lambda: (Kron(), EMA(0.9), LR(0.1)), ["Kron", "EMA"]),
    "rows in a part": (
        lambda: (Partition({"x": rows(), "y": Adam()}, kind), EMA(0.9), LR(0.1)),
        ["EMA", "Partition/x/EMA", "Partition/x/Rows"],
    ),
    "graft": (
        lambda: (Graft(Adam(), Shampoo()), LR(0.1)),
        ["Graft/norm_of", "Graft/direction_of"],
    ),
    "parallel": (
        lambda: (Parallel({"x": Adam(), "y": EMA(0.5)}, first), LR(0.1)),
        ["Parallel/x", "Parallel/y"],
    ),
    "steepest": (lambda: (EMA(0.9), Steepest(Sign()), Adam(), LR(0.1)), ["EMA", "Adam"]),
    "reset": (lambda: (EMA(0.9), Reset(Adam(), 3), LR(0.1)), ["EMA", "Reset/Adam"]),
    "freeze": (lambda: (EMA(0.9), Freeze(lambda *_: False), Adam(), LR(0.1)), ["EMA"]),
    "in a mask": (
        lambda: (Masked(Chain(EMA(0.9), Adam()), is_weight), LR(0.1)),
        ["Masked/EMA", "Masked/Adam"],
    ),
    "before and after a mask": (
        lambda: (EMA(0.9), Masked(Momentum(0.5), is_weight), Adam(), LR(0.1)),
        ["EMA", "Adam"],
    ),
    "before a part": (
        lambda: (
            EMA(0.9),
            Partition({"x": Adam(), "y": Identity()}, lambda n, p: "x"),
            LR(0.1),
        ),
        ["EMA"],
    ),
}
CASES = [(name, path) for name, (_, paths) in CHAINS.items() for path in paths]
QUICK = {"soap after a guard", "accumulate", "rows in a part", "sometimes", "guarded"}
"""Chains that quick tests load in every engine, where the others are slow."""


def in_engines(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """These cases, whose first value is a chain, in every engine."""
    rows = []
    for engine in ({}, {"fused": False}, {"compile": True}):
        for case in cases:
            slow = bool(engine) and case[0] not in QUICK
            rows.append(pytest.param(*case, engine, marks=pytest.mark.slow if slow else ()))
    return rows


@pytest.mark.parametrize(("chain", "path", "engine"), in_engines(CASES), ids=str)
def test_a_checkpoint_without_the_state_of_a_link_that_has_acted_is_refused(
    chain: str, path: str, engine: dict[str, Any]
) -> None:
    links, _ = CHAINS[chain]
    params, opt = make(links, **engine)
    train(params, opt, 4)
    _, fresh = make(links, **engine)
    with pytest.raises(ValueError, match=rf"the checkpoint has no state .*'{path}/\w+'"):
        fresh.load_state_dict(without(opt.state_dict(), path))
    assert not fresh.state
    fresh.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("key", ["left", "right_basis"])
def test_a_checkpoint_without_one_tensor_of_a_matrix_is_refused(key: str) -> None:
    links, _ = CHAINS["soap"]
    params, opt = make(links)
    train(params, opt, 4)
    damaged = copy.deepcopy(opt.state_dict())
    del damaged["state"][0][f"InBasis/SOAPBasis/{key}"]
    _, fresh = make(links)
    with pytest.raises(ValueError, match=f"has no state 'InBasis/SOAPBasis/{key}' for parameter 0"):
        fresh.load_state_dict(damaged)


def clean(step: int, i: int) -> float:
    return 1.0


def first_bad(step: int, i: int) -> float:
    return math.nan if step == 0 else 1.0


def some_missing(step: int, i: int) -> float | None:
    return None if (step + i) % 3 == 0 else 1.0


RUNS: list[tuple[str, Callable[[int, int], float | None]]] = [
    *[(chain, clean) for chain in (*CHAINS, "guarded", "sometimes")],
    *[(chain, some_missing) for chain in (*CHAINS, "guarded", "sometimes")],
    ("guarded", first_bad),
    ("soap after a guard", first_bad),
]


@pytest.mark.parametrize(
    ("chain", "gradient", "engine"),
    in_engines(RUNS),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_checkpoint_of_every_step_of_a_run_loads(
    chain: str, gradient: Callable[[int, int], float | None], engine: dict[str, Any]
) -> None:
    others: dict[str, Links] = {
        "guarded": lambda: (Guard(), EMA(0.9), Kron(), Accumulate(2), Adam(), LR(0.1)),
        "sometimes": lambda: (When(lambda step: step % 2 == 0, Adam()), EMA(0.9), LR(0.1)),
    }
    links = others[chain] if chain in others else CHAINS[chain][0]
    params, opt = make(links, **engine)
    for step in range(5):
        for i, p in enumerate(params):
            factor = gradient(step, i)
            p.grad = None if factor is None else torch.full_like(p, 0.5 * factor)
        opt.step()
        _, fresh = make(links, **engine)
        fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
