"""Plain numbers, their norms, and a loop that applies a rule with state step by step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

Real: TypeAlias = Any  # or None; no static type covers int, float, Fraction and Decimal alike
Vector: TypeAlias = Sequence[Real]
Order: TypeAlias = float | str
S = TypeVar("S")
X = TypeVar("X")
Y = TypeVar("Y")

POWERS: dict[Order, float] = {"l0": 0, "l1": 1, "l2": 2, "l3": 3, "l4": 4}
POWERS |= {"linf": math.inf, "inf": math.inf}
STATISTICS = ("mad", "std", "var", "sum")


def finite(x: Real) -> bool:
    """Return whether −∞ < x < ∞. The result is False for NaN."""
    return bool(x == x and abs(x) != math.inf)


def run(
    rule: Callable[..., tuple[Y, S]], inputs: Sequence[X], state: S, /, **hyperparameters: Any
) -> tuple[list[Y], S]:
    """Apply the rule to every input in turn: y, s ← rule(x, s).

    Returns:
        The list of outputs y, and the last state s.
    """
    outputs = []
    for x in inputs:
        y, state = rule(x, state, **hyperparameters)
        outputs.append(y)
    return outputs, state


def norm(xs: Vector, ord: Order = 2) -> Real:
    """Return (Σ|x|^p)^(1/p), max |x| for inf, or the number of nonzero elements for 0.

    Other orders are "l0" … "l4", "linf", "mad" = mean |x|, "std" and "var" (both unbiased, and 0
    for fewer than two elements), and "sum" = |Σx|. NaN counts as nonzero. Every other order of
    elements with a NaN is NaN.
    """
    p = POWERS.get(ord, ord)
    if p not in STATISTICS and (isinstance(p, str) or not p >= 0):
        accepted = ", ".join([*map(str, POWERS), *STATISTICS])
        raise ValueError(
            f"norm: ord must be a number of at least 0, inf, or one of {accepted}, got {ord!r}"
        )
    sizes = [abs(x) for x in xs]
    if p == 0:
        return sum(x != 0 for x in xs)
    if any(x != x for x in xs):
        return math.nan
    if p == "sum":
        return abs(sum(xs))
    if p == "mad":
        return statistics.mean(sizes) if sizes else 0
    if p in ("std", "var"):
        if len(xs) < 2:
            return 0
        if not all(map(finite, xs)):
            return math.nan
        return statistics.stdev(xs) if p == "std" else statistics.variance(xs)
    assert not isinstance(p, str)
    peak = max(sizes, default=0)
    if p == math.inf or peak == 0 or peak == math.inf:
        return peak
    if p == 1:
        return sum(sizes)
    one = peak / peak  # 1 in the arithmetic of xs, so that Decimals stay Decimals
    return peak * sum((size / peak) ** p for size in sizes) ** (one / p)
