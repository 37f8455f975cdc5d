"""The reference against numbers worked out by hand, and the comparison against wrong formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.engines import reference as ref
from tests.engines.reference import Parameter, Rule
from tests.engines.test_random_chains import Case, Difference, check


def outputs(rule: Rule, inputs: Sequence[Any], shape: tuple[int, ...] = (1,)) -> list[Any]:
    """What a rule makes of one tensor in every step."""
    p = Parameter("a.weight", 0, np.zeros(shape))
    out = []
    for u in inputs:
        before, p.grad = p.value.copy(), np.full(shape, u, dtype=np.float64)
        ref.Reference([p], ref.Chain(rule)).step()
        out.append((before - p.value).ravel())
    return [x.item() if shape == (1,) else x.tolist() for x in out]


NUMBERS: dict[str, tuple[Rule, list[float], list[float]]] = {
    "growth": (ref.ClipNormGrowth(), [1, 10, 10, 10, 10], [1, 1.5, 2.25, 3.375, 5.0625]),
    "growth falls": (
        ref.ClipNormGrowth(),
        [1, 0.1, 0.1, 0.1, 10],
        [1, 0.1, 0.1, 0.1, 0.1875],
    ),
    "growth from zero": (ref.ClipNormGrowth(), [0, 1, 10, 1], [0, 1, 1.5, 1]),
    "growth by sums": (ref.ClipNormGrowth(add=1, mul=None), [1, 10, 10], [1, 2, 3]),
    "small growth": (ref.ClipNormGrowth(), [1e-5, 1e-3, 1e-3], [1e-5, 1.5e-4, 2.25e-4]),
    "growth of values": (ref.ClipValueGrowth(), [1, -10, 10], [1, -1.5, 2.25]),
    "average": (ref.ClipNormByEMA(), [1] * 5, [0.01, 0.015, 0.0225, 0.032275, 0.041952]),
    "average of two": (
        ref.ClipNormByEMA(beta=0.5),
        [1, 1, 1, 100, 100],
        [0.5, 0.75, 0.875, 1.3125, 1.96875],
    ),
    "average without limit": (
        ref.ClipNormByEMA(beta=0.5, max_ema_growth=None),
        [1, 1, 1, 100, 100],
        [0.5, 0.75, 0.875, 50.4375, 75.21875],
    ),
    "average of signs": (
        ref.ClipNormByEMA(beta=0.9, max_ema_growth=None),
        [1, -1, 1, -1],
        [0.1, -0.01, 0.091, -0.0181],
    ),
    "normalised": (ref.NormalizeByEMA(beta=0.5), [1, 1, 0.1, 1], [0.5, 0.75, 0.425, 0.6375]),
    "average of values": (ref.ClipValueByEMA(), [1, 1, 1], [0.01, 0.0199, 0.029701]),
    "ratio": (
        ref.AdaptiveClip(ref.EMARatio(), warmup_steps=2),
        [2, 4, 3, 6, 3.15, 3.3, 0.1, 3],
        [1, 1, 3, 3.15, 3.15, 3.214890, 0.1, 3],  # the warm-up clips to 1
    ),
    "ratio, reciprocal": (
        ref.AdaptiveClip(ref.EMARatio(clipping="reciprocal"), warmup_steps=2),
        [2, 4, 3, 6],
        [1, 1, 3, 3.0075],
    ),
    "z-score": (
        ref.ZClip(max_norm=None, warmup_steps=3),
        [2, 3, 4, 3, 10, 3, 0.1, 3],
        [2, 3, 4, 3, 3.577382, 3, 0.1, 3],
    ),
    "z-score, percentile": (
        ref.ZClip(max_norm=None, warmup_steps=3, mode="percentile"),
        [2, 3, 4, 3, 10],
        [2, 3, 4, 3, 5.010390],
    ),
    "AdaGC": (  # γ is 1, .5, .5005, .501001, …
        ref.AdaGC(warmup_steps=3),
        [2, 0.5, 4, 4, 4, 0.1],
        [1, 0.5, 0.525, 0.525525, 0.526051, 0.1],
    ),
    "nesterov": (ref.Momentum(momentum=0.5, nesterov=True), [1, 1], [1.5, 1.75]),
    "dampening": (ref.Momentum(momentum=0.5, dampening=0.5), [1, 1, 1], [1, 1, 1]),
    "Adam": (ref.Adam(eps=0.0), [3, 3, -3], [1, 1, 0.261993]),
    "accumulate": (ref.Accumulate(2), [1, 3, 5, 7], [0, 2, 0, 6]),
    "warm-up": (ref.Warmup(steps=2), [1, 1, 1], [0.5, 1, 1]),
    "looking ahead": (ref.Lookahead(k=2), [-1, -1, -1, -1], [-1, 0, -1, 0]),
    "looking ahead, late": (
        ref.Lookahead(k=2, start="sync"),
        [-1, -1, -1, -1],
        [-1, -1, -1, 0],
    ),
    "parallel": (
        ref.Parallel(
            {"a": ref.Scale(factor=2.0), "b": ref.Momentum(momentum=0.5)},
            merge=lambda u: u["a"] + u["b"],
        ),
        [1, 1],
        [3, 3.5],
    ),
    "graft": (
        ref.Graft(ref.Scale(factor=2.0), ref.Scale(factor=-5.0)),
        [3, 0],
        [-6, 0],
    ),
    "steepest": (ref.Steepest(ref.Scale(factor=0.5)), [4, -4], [16, -16]),
    "schedule-free": (  # z is 1, 2, 3, and w half-way from its mean to it
        ref.Chain(ref.LR(lr=1.0), ref.ScheduleFree(beta=0.5)),
        [-1, -1, -1],
        [-1, -0.75, -0.75],
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_rule_of_the_reference_gives_the_numbers_by_hand(case: str) -> None:
    rule, inputs, wanted = NUMBERS[case]
    assert outputs(rule, inputs) == pytest.approx(wanted, abs=1e-6)


MEANS: dict[str, tuple[Rule, list[float]]] = {  # of weights 1, 2, 3, 4, 5
    "average": (ref.WeightEMA(decay=0.5), [1, 1.5, 2.25, 3.125, 4.0625]),
    "average of every other": (ref.WeightEMA(decay=0.5, every=2), [1, 1, 2, 2, 3.5]),
    "average, warm-up": (ref.WeightEMA(warmup=True), [1, 20 / 11, 29.75 / 11]),
    "mean": (ref.WeightAverage(start=1, every=2), [1, 2, 2, 3, 3]),
}


@pytest.mark.parametrize("case", MEANS)
def test_weights_for_evaluation_are_the_numbers_by_hand(case: str) -> None:
    rule, wanted = MEANS[case]
    p = Parameter("a.weight", 0, np.zeros(1))
    run, found = ref.Reference([p], ref.Chain(rule)), []
    assert run.averaged(p) is p.value
    for _ in wanted:
        p.grad = np.full(1, -1.0)
        run.step()
        found.append(run.averaged(p).item())
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_memory_takes_nothing_in_that_is_no_number(bad: float) -> None:
    p = Parameter("a.weight", 0, np.zeros(1))
    for rule, inputs, last in (
        (ref.ClipNormGrowth(), [1, bad, 10], 1.5),
        (ref.ClipNormByEMA(beta=0.5), [1, 1, bad, 1], 0.875),
        (ref.ClipValueGrowth(), [1, bad, 10], 1.5),
    ):
        for u in inputs:
            p.value, p.grad = np.zeros(1), np.array([float(u)])
            with np.errstate(all="ignore"):
                ref.Reference([p], ref.Chain(rule)).step()
        assert -p.value[0] == last


def test_norms_of_several_tensors() -> None:
    a, b = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    ps = [Parameter("a", 0, np.zeros(2), a), Parameter("b", 1, np.zeros(2), b)]
    ref.Reference(ps, ref.Chain(ref.ClipNorm(max_norm=1.0, dim="global"))).step()
    assert -ps[0].value == pytest.approx([0.597022, 0.796029], abs=1e-6)
    assert -ps[1].value == pytest.approx([0.059702, 0.079603], abs=1e-6)


def test_each_row_of_a_matrix() -> None:
    p = Parameter("a", 0, np.zeros((2, 2)), np.array([[3.0, 4.0], [0.0, 0.5]]))
    rule = ref.ClipNorm(max_norm=1.0, dim=0, inverse_dims=True)
    ref.Reference([p], ref.Chain(rule)).step()
    assert -p.value == pytest.approx(np.array([[0.6, 0.8], [0.0, 0.5]]))


WRONG: dict[str, tuple[Any, str, Any]] = {
    "a learning rate": (
        ref.LR,
        "update",
        lambda self, u, w, m, live: u * live["lr"] * (1 + 1e-7),
    ),
    "a decay": (
        ref.WeightDecay,
        "update",
        lambda self, u, w, m, live: u + live["weight_decay"],
    ),
    "a memory": (ref, "growth_memory", lambda p, size, live: size),
    "a scope": (
        ref,
        "units_of",
        lambda flows, dim: {flow.parameter: [flow] for flow in flows},
    ),
    "averaged weights:": (ref.Average, "averaged", lambda self, p: p.value),
    "a share": (ref.ScheduleFree, "share", lambda self, group: (0.5, 1.0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_formula_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among a few chains one tells a wrong reference from a right library."""
    seeds = agreeing()
    monkeypatch.setattr(*WRONG[wrong])
    assert any(differs(seed) for seed in seeds)


@cache
def agreeing() -> list[int]:
    """Seeds of a few chains that the library and the reference agree on."""
    return [seed for seed in (4, 7, 8, 10, 12, 20) if not differs(seed)]


def differs(seed: int) -> bool:
    try:
        check(Case(seed), "plain")
    except (Difference, RuntimeError):
        return True
    return False
