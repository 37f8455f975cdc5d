"""Arithmetic that several rules share, and the tolerance within which numbers are equal."""

from __future__ import annotations

import math

from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite

TIE = 2**-20
"""Norms are equal if their relative difference is at most this: float32 is not more precise."""


def rescaled(xs: Vector, have: Real, want: Real, ord: Order = 2) -> list[Real]:
    """Return u / have · want, whose measure is `want`.

    A variance grows with the square of u, so for "var" the factor is the root of want / have.
    """
    if ord == "var":
        have = math.sqrt(have)
        want = math.sqrt(want)
    return [x / have * want for x in xs]


def limited(n: Real, limit: Real) -> Real:
    """Return min(n, limit), the norm after clipping.

    If the norm is not finite and the limit is, the result is NaN.
    """
    if not finite(n):
        return n if limit == math.inf else math.nan
    return min(n, limit)


def blend(old: Real, new: Real, beta: Real) -> Real:
    """Return β·old + (1 − β)·new, computed so that equal numbers give exactly that number."""
    return old + (1 - beta) * (new - old)


def deviation(x: Real, mean: Real) -> Real:
    """Return x − μ, or 0 if x and μ are equal up to rounding."""
    difference = x - mean
    return difference if abs(difference) * 2**20 > mean else 0 * difference


def is_below(x: Real, y: Real) -> bool:
    """Return whether x < y and they differ by more than rounding; exact for any kind of number."""
    return x * 2**20 < y * (2**20 - 1)
