"""What several rules compute with, and what counts as equal."""

from __future__ import annotations

import math

from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite

TIE = 2**-20  # norms that differ by no more than this share are equal: float32 knows no better


def rescaled(xs: Vector, have: Real, want: Real, ord: Order = 2) -> list[Real]:
    """u/have · want: gives u the measure `want`; "var" grows with the square, hence its root."""
    if ord == "var":
        have, want = math.sqrt(have), math.sqrt(want)
    return [x / have * want for x in xs]


def limited(n: Real, limit: Real) -> Real:
    """min(n, limit): the norm that is left; NaN where a finite limit meets a non-finite norm."""
    if not finite(n):
        return n if limit == math.inf else math.nan
    return min(n, limit)


def blend(old: Real, new: Real, beta: Real) -> Real:
    """β·old + (1 − β)·new, written so that a constant stays exactly what it is."""
    return old + (1 - beta) * (new - old)


def deviation(x: Real, mean: Real) -> Real:
    """x − μ, 0 where they are equal up to rounding."""
    away = x - mean
    return away if abs(away) * 2**20 > mean else 0 * away


def is_below(x: Real, y: Real) -> bool:
    """x < y, and not equal up to rounding; exact, whatever kind of number they are."""
    return x * 2**20 < y * (2**20 - 1)
