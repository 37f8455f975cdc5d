"""Rules whose limit is a quantile of past norms. It is computed, estimated or tracked.

The limit depends on past norms only. After clipping, the rule observes the current norm. As long as
the quantile is zero, there is no limit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torchzero_clip.spec.arithmetic import TIE, blend, is_below, limited
from torchzero_clip.spec.plain_numbers import Real, Vector, finite


def interpolated_quantile(xs: Vector, q: Real) -> Real:
    """Return the value at index q · (len − 1) of the sorted xs, with linear interpolation."""
    ranked = sorted(xs)
    at = q * (len(ranked) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (at - below) * (ranked[above] - ranked[below])


def quantile(
    n: Real, norms: tuple[Real, ...], q: Real = 0.95, window: int = 1024
) -> tuple[Real, tuple[Real, ...]]:
    """Return min(n, the q-quantile of the last `window` norms), and the norms with n appended."""
    limit = interpolated_quantile(norms, q) if norms else 0
    c = limited(n, limit or math.inf)
    return c, (*norms, n)[-window:] if finite(n) else norms


class Markers(NamedTuple):
    """The heights and the ranks of the markers.

    Before the fifth norm, the heights are the sorted norms. The last rank is the number of norms.
    """

    heights: tuple[Real, ...] = ()
    positions: tuple[int, ...] = ()


def p2_observe(x: Real, state: Markers, q: Real) -> Markers:
    """Update the five markers of the P² estimator (Jain and Chlamtac, 1985).

    The markers stay near the ranks 1 + (count − 1)·(0, q/2, q, (1 + q)/2, 1). A marker that is a
    whole rank away moves by one rank. Its new height is on the parabola through the neighboring
    markers. If the parabola would change the order of the heights, the height is on a line.
    """
    if len(state.heights) < 5:
        return Markers(
            tuple(sorted((*state.heights, x))), (*state.positions, len(state.heights) + 1)
        )
    h = [min(x, state.heights[0]), *state.heights[1:4], max(x, state.heights[4])]
    k = [rank + is_below(x, height) for rank, height in zip(state.positions, h, strict=True)]
    k[4] = state.positions[4] + 1
    for i, share in ((1, q / 2), (2, q), (3, (1 + q) / 2)):
        gap = 1 + (k[4] - 1) * share - k[i]
        d = 1 if gap > 0 else -1
        if abs(gap) < 1 or abs(k[i + d] - k[i]) <= 1:
            continue
        above = k[i + 1] - k[i]
        below = k[i] - k[i - 1]
        slope_above = (h[i + 1] - h[i]) / above
        slope_below = (h[i] - h[i - 1]) / below
        bend = (below + d) * slope_above + (above - d) * slope_below
        moved = h[i] + d * bend / (above + below)
        if not h[i - 1] < moved < h[i + 1]:
            moved = h[i] + d * (slope_above if d > 0 else slope_below)
        h[i] = moved
        k[i] += d
    return Markers(tuple(h), tuple(k))


def p2_estimate(state: Markers, q: Real) -> Real:
    """Return the height of the middle marker.

    Before there are five norms, return their interpolated quantile, or 0 if there is no norm.
    """
    if len(state.heights) == 5:
        return state.heights[2]
    return interpolated_quantile(state.heights, q) if state.heights else 0


def p2_quantile(n: Real, state: Markers, q: Real = 0.5) -> tuple[Real, Markers]:
    """Return min(n, the P² estimate of the q-quantile); then the markers observe n."""
    c = limited(n, p2_estimate(state, q) or math.inf)
    return c, p2_observe(n, state, q) if finite(n) else state


class Tracked(NamedTuple):
    """The quantile Q, and the EMA s of |n − Q|. Q is None before the first norm."""

    quantile: Real = None
    spread: Real = 0


def ema_quantile(
    n: Real, state: Tracked, q: Real = 0.95, ema_decay: Real = 0.99
) -> tuple[Real, Tracked]:
    """Return min(n, Q), then update s and Q.

    First s ← EMA of |n − Q|, then Q ← Q + (1 − ema_decay) · s · (q − 1[n < Q]). Q starts at the
    first norm and s at 0. Q is never negative.
    """
    c = limited(n, state.quantile or math.inf)
    if not finite(n):
        return c, state
    if state.quantile is None:
        return c, Tracked(n)
    spread = blend(state.spread, abs(n - state.quantile), ema_decay)
    step = (1 - ema_decay) * spread * (q - is_below(n, state.quantile))
    return c, Tracked(max(state.quantile + step, 0), spread)


def geometric_quantile(
    n: Real, quantile: Real, q: Real = 0.5, rate: Real = 0.2
) -> tuple[Real, Real]:
    """Return min(n, Q); then Q ← Q · exp(rate · (q − 1[n ≤ Q])), or Q ← n if Q is 0."""
    c = limited(n, quantile or math.inf)
    if not finite(n) or not quantile:
        return c, n if finite(n) else quantile
    small = n * 2**20 <= quantile * (2**20 + 1)
    return c, quantile * math.exp(rate * (q - small))


class Record(NamedTuple):
    """The markers of the P² estimator, and Welford's count, mean and Σ(x − mean)²."""

    markers: Markers = Markers()
    steps: int = 0
    mean: Real = 0
    m2: Real = 0


def auto_clip(n: Real, state: Record) -> tuple[Real, Record]:
    """Return min(n, median + 3 · std). Then the estimators of the median and the std observe n.

    The median is a P² estimate. Welford's algorithm computes the unbiased standard deviation. This
    function is the mode "auto". The mode "percentile" is `quantile` or `ema_quantile` with q =
    percentile / 100.
    """
    limit = math.inf
    std = math.sqrt(state.m2 / (state.steps - 1)) if state.steps > 1 else 0
    if std > TIE * state.mean:
        limit = p2_estimate(state.markers, 0.5) + 3 * std
    c = limited(n, limit)
    if not finite(n):
        return c, state
    steps = state.steps + 1
    mean = state.mean + (n - state.mean) / steps
    m2 = state.m2 + (n - state.mean) * (n - mean)
    return c, Record(p2_observe(n, state.markers, 0.5), steps, mean, m2)
