"""Arithmetic that several rules share, and the tolerance for comparing numbers."""

from __future__ import annotations

import math

from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite

TIE = 2**-20
"""The relative difference up to which norms count as equal. float32 is not more precise."""


def rescaled(xs: Vector, have: Real, want: Real, ord: Order = 2) -> list[Real]:
    """Return u / have · want. The norm of the result is `want`.

    A variance grows with the square of u, so for "var" the factor is the root of want / have.
    """
    if ord == "var":
        have = math.sqrt(have)
        want = math.sqrt(want)
    return [x / have * want for x in xs]


def limited(n: Real, limit: Real) -> Real:
    """Return min(n, limit), the norm after clipping.

    If the limit is finite but the norm is not, the result is NaN.
    """
    if not finite(n):
        return n if limit == math.inf else math.nan
    return min(n, limit)


def blend(old: Real, new: Real, beta: Real) -> Real:
    """Return β·old + (1 − β)·new. If old equals new, the result is exactly this number."""
    return old + (1 - beta) * (new - old)


def deviation(x: Real, mean: Real) -> Real:
    """Return x − μ, or 0 if x and μ are equal up to rounding."""
    difference = x - mean
    return difference if abs(difference) * 2**20 > mean else 0 * difference


def is_below(x: Real, y: Real) -> bool:
    """Return whether x < y by more than rounding. The result is exact for any kind of number."""
    return x * 2**20 < y * (2**20 - 1)
