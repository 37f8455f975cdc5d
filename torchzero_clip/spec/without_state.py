"""Rules without state, as functions of one unit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from fractions import Fraction

from torchzero_clip.spec.arithmetic import rescaled
from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite, norm


def clip_value(xs: Vector, low: Real, high: Real) -> list[Real]:
    """Return min(max(x, low), high) elementwise. NaN stays NaN."""
    return [x if x != x else min(max(x, low), high) for x in xs]


def clip_norm(xs: Vector, max_norm: Real, sqrt: Callable[[Real], Real] = math.sqrt) -> list[Real]:
    """Return u · min(1, |max_norm| / ‖u‖₂).

    Σx² and max_norm² are compared as Fractions, so the decision is exact for every kind of number.
    `sqrt` is called only if the norm is clipped, on Σ(x / max |x|)². Only the magnitude of max_norm
    is used, so the rule is defined for every number.
    """
    limit = abs(max_norm)
    if limit == math.inf:
        return list(xs)
    if not all(map(finite, xs)):
        return rescaled(xs, norm(xs), limit)
    if sum(Fraction(x) ** 2 for x in xs) <= Fraction(limit) ** 2:
        return list(xs)
    peak = max(abs(x) for x in xs)
    return rescaled(xs, peak * sqrt(sum((x / peak) ** 2 for x in xs)), limit)


def clip_by(xs: Vector, limit: Real, ord: Order = 2) -> list[Real]:
    """Return u · min(1, limit / n), with n = norm(u, ord); for "var" the factor is its root.

    The norm of the result is at most `limit`, except for "l0", which no scaling changes.
    """
    n = norm(xs, ord)
    if n == 0 or n <= limit or limit == math.inf:
        return list(xs)
    return rescaled(xs, n, limit, ord)


def normalize(xs: Vector, norm_value: Real = 1, ord: Order = 2) -> list[Real]:
    """Return u · norm_value / n, with n = norm(u, ord); for "var" the factor is its root."""
    n = norm(xs, ord)
    return list(xs) if n in (0, norm_value) else rescaled(xs, n, norm_value, ord)


def centralize(xs: Vector) -> list[Real]:
    """Return u − mean(u). A single element is not changed."""
    if len(xs) < 2:
        return list(xs)
    mean = statistics.mean(xs)
    return [x - mean for x in xs]


def standardize(xs: Vector, eps: Real = 1e-8, ulp: Real = 2.0**-52) -> list[Real]:
    """Return (u − mean) / (std + eps), with the unbiased std. A single element is not changed.

    If the elements are equal up to rounding (std ≤ 4·ulp·|mean|), the result is zeros. `ulp` is
    the relative spacing of the original numbers, 2⁻²³ for float32.
    """
    if len(xs) < 2:
        return list(xs)
    mean = statistics.mean(xs)
    std = norm(xs, "std")
    if std <= 4 * ulp * abs(mean):
        return [x - x for x in xs]
    return [(x - mean) / (std + eps) for x in xs]


def clip_percentile(xs: Vector, percentile: Real) -> list[Real]:
    """Clamp u to ±b, where b is the sorted |u| at index ⌊percentile · (len − 1) / 100⌋.

    NaNs are sorted last, as in torch. NaNs above the index stay NaN. If b itself is NaN, every
    element becomes NaN.
    """
    if not xs:
        return []
    sizes = sorted((abs(x) for x in xs), key=lambda size: (size != size, size))
    bound = sizes[math.floor(percentile * (len(xs) - 1) / 100)]
    return clip_value(xs, -bound, bound) if bound == bound else [bound for _ in xs]


def clip_rms(xs: Vector, max_rms: Real = 1) -> list[Real]:
    """Return u / max(1, RMS(u) / max_rms), with RMS(u) = ‖u‖₂ / √len."""
    rms = norm(xs) / math.sqrt(len(xs)) if xs else 0
    if rms == 0 or rms <= max_rms or max_rms == math.inf:
        return list(xs)
    return rescaled(xs, rms, max_rms)


def soft_clip(xs: Vector, max_norm: Real, ord: Order = 2) -> list[Real]:
    """Return u / (1 + n / max_norm), with n = norm(u, ord); for "var" the divisor is its root.

    It is computed as u · max_norm / (max_norm + n), so the norm of the result stays below
    max_norm.
    """
    n = norm(xs, ord)
    if n == 0 or max_norm == math.inf:
        return list(xs)
    return rescaled(xs, max_norm + n, max_norm, ord)


def delta_clip(xs: Vector, max_norm: Real, delta: Real = 1e-3, ord: Order = 2) -> list[Real]:
    """Return u · min(1, max(delta, max_norm / n)), with n = norm(u, ord).

    For "var" the factor is its root.
    """
    n = norm(xs, ord)
    return clip_by(xs, max(max_norm, delta * n) if finite(n) else max_norm, ord)


def sign(xs: Vector) -> list[Real]:
    """Return −1, 0 or 1 elementwise. NaN stays NaN, although torch.sign returns 0 for NaN."""
    return [x if x != x else (x > 0) - (x < 0) for x in xs]


def nan_to_num(xs: Vector, nan: Real = 0, posinf: Real = 0, neginf: Real = 0) -> list[Real]:
    """Replace NaN, inf and −inf by `nan`, `posinf` and `neginf`, elementwise."""

    def replaced(x: Real) -> Real:
        if finite(x):
            return x
        if x != x:
            return nan
        return posinf if x > 0 else neginf

    return [replaced(x) for x in xs]


def agc(g: Vector, w: Vector, clipping: Real = 0.01, eps: Real = 1e-3) -> list[Real]:
    """Clip the gradient g of the weights w to the limit clipping · max(‖w‖, eps).

    If ‖g‖ exceeds the limit, return g · limit / max(‖g‖, 1e-6), otherwise g.
    """
    n = norm(g)
    limit = clipping * max(norm(w), eps)
    return list(g) if n <= limit or limit == math.inf else rescaled(g, max(n, 1e-6), limit)


def clippy(u: Vector, w: Vector, relative: Real = 0.1, absolute: Real = 1e-7) -> list[Real]:
    """Return u · min(1, minᵢ (relative · |wᵢ| + absolute) / |uᵢ|), where w are the weights.

    The minimum skips elements of u that are zero.
    """
    bounds = [relative * abs(x) + absolute for x in w]
    ratios = [abs(x) / b if b else math.inf for x, b in zip(u, bounds, strict=True) if x != 0]
    largest = norm(ratios, math.inf)
    return list(u) if largest <= 1 else rescaled(u, largest, 1)
