"""The rules as pure functions of plain numbers: the definition the kernels are tested against.

A rule sees one unit: the entries `xs` of a tensor, a slice, a layer, a group or a whole model, or
only their norm `n`, or one entry `x` where the state is per entry. A rule with state is one step,
`(input, state) -> (output, new state)`: the type of the state without arguments is the state
before the first step, and `run` repeats the step.

Numbers are int, float, Fraction or Decimal. Fractions stay exact wherever no root is taken,
Decimals need Decimal hyperparameters, NaN and inf are floats. Arguments are taken to be valid: the
classes check theirs. Four conventions hold throughout:

* nothing to clip returns the numbers themselves;
* a zero norm, or an empty unit, is left alone;
* a NaN norm gives NaN, an infinite one gives 0 for finite entries and NaN for infinite ones; a
  rule with state then returns the state it was given, as if the step had not happened;
* a limit of 0 gives zeros, a limit of inf never clips, whatever the norm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias, TypeVar

Real: TypeAlias = Any  # or None; no static type covers int, float, Fraction and Decimal alike
Vector: TypeAlias = Sequence[Real]
Order: TypeAlias = float | str
Clipping: TypeAlias = str | Callable[[Real, Real], Real]
S = TypeVar("S")
X = TypeVar("X")
Y = TypeVar("Y")

POWERS: dict[Order, float] = {"l0": 0, "l1": 1, "l2": 2, "l3": 3, "l4": 4}
POWERS |= {"linf": math.inf, "inf": math.inf}
STATISTICS = ("mad", "std", "var", "sum")


def finite(x: Real) -> bool:
    """−∞ < x < ∞, false for NaN."""
    return bool(x == x and abs(x) != math.inf)


def run(
    rule: Callable[..., tuple[Y, S]], inputs: Sequence[X], state: S, /, **hyperparameters: Any
) -> tuple[list[Y], S]:
    """s, y₁ ← rule(x₁, s); s, y₂ ← rule(x₂, s); … : every output and the last state."""
    outputs = []
    for x in inputs:
        y, state = rule(x, state, **hyperparameters)
        outputs.append(y)
    return outputs, state


# --- norms


def norm(xs: Vector, ord: Order = 2) -> Real:
    """(Σ|x|^p)^(1/p); max |x| for inf; the number of non-zeros for 0.

    Also "l0" … "l4", "linf", "mad" = mean |x|, "std" and "var" (both unbiased, 0 for fewer than
    two entries), "sum" = |Σx|. NaN counts as a non-zero; any other order of a NaN is NaN.
    """
    p = POWERS.get(ord, ord)
    if p not in STATISTICS and (isinstance(p, str) or not p >= 0):
        accepted = ", ".join([*map(str, POWERS), *STATISTICS])
        raise ValueError(f"norm: ord must be a number ≥ 0, inf, or one of {accepted}, got {ord!r}")
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


def _rescale(xs: Vector, have: Real, want: Real, ord: Order = 2) -> list[Real]:
    """u/have · want: gives u the measure `want`; "var" grows with the square, hence its root."""
    if ord == "var":
        have, want = math.sqrt(have), math.sqrt(want)
    return [x / have * want for x in xs]


# --- without state


def clip_value(xs: Vector, low: Real, high: Real) -> list[Real]:
    """min(max(x, low), high), entry by entry; NaN stays NaN."""
    return [x if x != x else min(max(x, low), high) for x in xs]


def clip_norm(xs: Vector, max_norm: Real, sqrt: Callable[[Real], Real] = math.sqrt) -> list[Real]:
    """u · min(1, |max_norm| / ‖u‖₂).

    Σx² and max_norm² are compared as Fractions, so the decision is exact for every kind of number;
    `sqrt` is called only in the branch that clips, on Σ(x / max |x|)². Only the magnitude of
    max_norm counts, so the rule is defined for every number.
    """
    limit = abs(max_norm)
    if limit == math.inf:
        return list(xs)
    if not all(map(finite, xs)):
        return _rescale(xs, norm(xs), limit)
    if sum(Fraction(x) ** 2 for x in xs) <= Fraction(limit) ** 2:
        return list(xs)
    peak = max(abs(x) for x in xs)
    return _rescale(xs, peak * sqrt(sum((x / peak) ** 2 for x in xs)), limit)


def clip_by(xs: Vector, limit: Real, ord: Order = 2) -> list[Real]:
    """u · min(1, limit / n), √(limit / n) for "var", with n = norm(u, ord).

    The result has measure `limit`, except for "l0", which no scaling changes.
    """
    n = norm(xs, ord)
    if n == 0 or n <= limit or limit == math.inf:
        return list(xs)
    return _rescale(xs, n, limit, ord)


def normalize(xs: Vector, norm_value: Real = 1, ord: Order = 2) -> list[Real]:
    """u · norm_value / n, √(norm_value / n) for "var", with n = norm(u, ord)."""
    n = norm(xs, ord)
    return list(xs) if n in (0, norm_value) else _rescale(xs, n, norm_value, ord)


def centralize(xs: Vector) -> list[Real]:
    """u − mean(u); a single entry is left alone."""
    if len(xs) < 2:
        return list(xs)
    mean = statistics.mean(xs)
    return [x - mean for x in xs]


def standardize(xs: Vector, eps: Real = 1e-8, ulp: Real = 2.0**-52) -> list[Real]:
    """(u − mean) / (std + eps), std unbiased; a single entry is left alone.

    Entries equal up to rounding, std ≤ 4·ulp·|mean|, give zeros; `ulp` is the relative spacing of
    the numbers the entries came from, 2⁻²³ for float32.
    """
    if len(xs) < 2:
        return list(xs)
    mean, std = statistics.mean(xs), norm(xs, "std")
    if std <= 4 * ulp * abs(mean):
        return [x - x for x in xs]
    return [(x - mean) / (std + eps) for x in xs]


def clip_percentile(xs: Vector, percentile: Real) -> list[Real]:
    """Clamp to ±b, b = the ascending sorted |u| at index ⌊percentile · (len − 1) / 100⌋.

    NaNs sort last, as in torch: those above the index stay what they are, and a NaN bound makes
    every entry NaN.
    """
    if not xs:
        return []
    sizes = sorted((abs(x) for x in xs), key=lambda size: (size != size, size))
    bound = sizes[math.floor(percentile * (len(xs) - 1) / 100)]
    return clip_value(xs, -bound, bound) if bound == bound else [bound for _ in xs]


def clip_rms(xs: Vector, max_rms: Real = 1) -> list[Real]:
    """u / max(1, RMS(u) / max_rms), RMS(u) = ‖u‖₂ / √len."""
    rms = norm(xs) / math.sqrt(len(xs)) if xs else 0
    if rms == 0 or rms <= max_rms or max_rms == math.inf:
        return list(xs)
    return _rescale(xs, rms, max_rms)


def soft_clip(xs: Vector, max_norm: Real, ord: Order = 2) -> list[Real]:
    """u / (1 + n / max_norm), √ of that for "var", with n = norm(u, ord).

    Written as u · max_norm / (max_norm + n): the measure of the result stays below max_norm.
    """
    n = norm(xs, ord)
    if n == 0 or max_norm == math.inf:
        return list(xs)
    return _rescale(xs, max_norm + n, max_norm, ord)


def delta_clip(xs: Vector, max_norm: Real, delta: Real = 1e-3, ord: Order = 2) -> list[Real]:
    """u · min(1, max(delta, max_norm / n)), √ of that for "var", with n = norm(u, ord)."""
    n = norm(xs, ord)
    return clip_by(xs, max(max_norm, delta * n) if finite(n) else max_norm, ord)


def sign(xs: Vector) -> list[Real]:
    """−1, 0 or 1, entry by entry; NaN stays NaN (torch.sign turns it into 0 and so hides it)."""
    return [x if x != x else (x > 0) - (x < 0) for x in xs]


def nan_to_num(xs: Vector, nan: Real = 0, posinf: Real = 0, neginf: Real = 0) -> list[Real]:
    """NaN, inf and −inf, entry by entry, become `nan`, `posinf` and `neginf`."""
    return [x if finite(x) else nan if x != x else posinf if x > 0 else neginf for x in xs]


def agc(g: Vector, w: Vector, clipping: Real = 0.01, eps: Real = 1e-3) -> list[Real]:
    """g, or where ‖g‖ > limit = clipping · max(‖w‖, eps): g · limit / max(‖g‖, 1e-6), weights w."""
    n, limit = norm(g), clipping * max(norm(w), eps)
    return list(g) if n <= limit or limit == math.inf else _rescale(g, max(n, 1e-6), limit)


def clippy(u: Vector, w: Vector, relative: Real = 0.1, absolute: Real = 1e-7) -> list[Real]:
    """u · min(1, minᵢ (relative · |wᵢ| + absolute) / |uᵢ|), weights w; zeros have no say."""
    most = [relative * abs(x) + absolute for x in w]
    shares = [abs(x) / m if m else math.inf for x, m in zip(u, most, strict=True) if x != 0]
    farthest = norm(shares, math.inf)
    return list(u) if farthest <= 1 else _rescale(u, farthest, 1)


# --- ties

TIE = 2**-20  # norms that differ by no more than this share are equal: float32 knows no better


def _deviation(x: Real, mean: Real) -> Real:
    """x − μ, 0 where they are equal up to rounding."""
    away = x - mean
    return away if abs(away) * 2**20 > mean else 0 * away


def _below(x: Real, y: Real) -> bool:
    """x < y, and not equal up to rounding; exact, whatever kind of number they are."""
    return x * 2**20 < y * (2**20 - 1)


# --- growth


def _clip(n: Real, limit: Real) -> Real:
    """min(n, limit): the norm that is left; NaN where a finite limit meets a non-finite norm."""
    if not finite(n):
        return n if limit == math.inf else math.nan
    return min(n, limit)


def _blend(old: Real, new: Real, beta: Real) -> Real:
    """β·old + (1 − β)·new, written so that a constant stays exactly what it is."""
    return old + (1 - beta) * (new - old)


class Growth(NamedTuple):
    """p, inf until a non-zero norm has been seen."""

    previous: Real = math.inf


def growth_limit(state: Growth, add: Real = None, mul: Real = 1.5, min_value: Real = 1e-4) -> Real:
    """L = min(p + add, max(p, min_value) · mul) over those given, inf while there is no p."""
    p = state.previous
    if p == math.inf:
        return math.inf
    by_add = math.inf if add is None else p + add
    by_mul = math.inf if mul is None else max(p, min_value) * mul
    return min(by_add, by_mul)


def clip_norm_growth(
    n: Real,
    state: Growth,
    add: Real = None,
    mul: Real = 1.5,
    min_value: Real = 1e-4,
    max_decay: Real = 2,
) -> tuple[Real, Growth]:
    """c = min(n, L); p ← max(c, p / max_decay), with L of growth_limit.

    `add` or `mul` may be None, not both; with max_decay=inf the bound falls as fast as the norm.
    """
    p = state.previous
    c = _clip(n, growth_limit(state, add, mul, min_value))
    if not finite(n) or (n == 0 and p == math.inf):
        return c, state
    return c, Growth(c if p == math.inf else max(c, p / max_decay))


def clip_value_growth(
    x: Real,
    state: Growth,
    add: Real = None,
    mul: Real = 1.5,
    min_value: Real = 1e-4,
    max_decay: Real = 2,
) -> tuple[Real, Growth]:
    """clip_norm_growth of |x|, sign kept: one entry; ±inf is clamped to its limit."""
    limit = growth_limit(state, add, mul, min_value)
    _, after = clip_norm_growth(abs(x), state, add, mul, min_value, max_decay)
    return clip_value([x], -limit, limit)[0], after


# --- EMA


class Average(NamedTuple):
    """m, one entry per entry of u, and the last e that was not zero."""

    mean: tuple[Real, ...] = ()
    norm: Real = 0


def clip_norm_by_ema(
    xs: Vector,
    state: Average,
    beta: Real = 0.99,
    ord: Order = 2,
    eps: Real = 1e-6,
    max_ema_growth: Real = 1.5,
    ema_init: str = "zeros",
    rule: Callable[[Vector, Real, Order], list[Real]] = clip_by,
) -> tuple[list[Real], Average]:
    """m ← βm + (1 − β)u; u · min(1, max(e, eps) / n), with e = ‖m‖ and n = ‖u‖.

    e is at most max_ema_growth (None: any) times the last e that was not zero, m shrinks with it;
    m₀ is 0, or the first u for "update". A non-finite u meets the last such e, and is forgotten.
    """
    if not all(map(finite, xs)):
        return rule(xs, max(state.norm, eps), ord), state
    first = xs if ema_init == "update" else [0] * len(xs)
    mean = [_blend(m, x, beta) for m, x in zip(state.mean or first, xs, strict=True)]
    e = norm(mean, ord)
    most = math.inf if max_ema_growth is None else state.norm * max_ema_growth
    if state.norm > 0 and e > most:
        mean, e = _rescale(mean, e, most, ord), most
    return rule(xs, max(e, eps), ord), Average(tuple(mean), e or state.norm)


def normalize_by_ema(
    xs: Vector, state: Average, **hyperparameters: Any
) -> tuple[list[Real], Average]:
    """u · max(e, eps) / n: everything else, the arguments too, as in clip_norm_by_ema."""
    return clip_norm_by_ema(xs, state, **hyperparameters, rule=normalize)


def clip_value_by_ema(
    xs: Vector,
    state: tuple[Real, ...],
    beta: Real = 0.99,
    ema_init: str = "zeros",
    ema_tfm: Callable[[list[Real]], Vector] | None = None,
) -> tuple[list[Real], tuple[Real, ...]]:
    """m ← βm + (1 − β)|u| per entry; clamp to ±m, or to ±|ema_tfm(m)|.

    m₀ is 0, or the first finite |u| of the entry for "update", inf until there is one; a
    non-finite entry leaves its m as it is, and inf is clamped to it.
    """
    start = math.inf if ema_init == "update" else 0
    mean = []
    for x, m in zip(xs, state or [start] * len(xs), strict=True):
        seen = abs(x) if m == math.inf else _blend(m, abs(x), beta)
        mean.append(seen if finite(x) else m)
    bounds = mean if ema_tfm is None else ema_tfm(list(mean))
    output = [clip_value([x], -abs(b), abs(b))[0] for x, b in zip(xs, bounds, strict=True)]
    return output, tuple(mean)


# --- past norms
# From here on the statistics of past norms set the limit, then this norm is observed. A statistic
# of zero (μ, v, a quantile) sets no limit yet.


class WarmUp(NamedTuple):
    """The raw norms collected so far."""

    seen: tuple[Real, ...] = ()


def adaptive_clip(
    n: Real,
    state: WarmUp | S,
    rule: Callable[[Real, S], tuple[Real, S]],
    start: Callable[[Sequence[Real]], S],
    warmup_steps: int = 20,
    warmup_norm: Real = 1,
) -> tuple[Real, WarmUp | S]:
    """min(n, warmup_norm) for warmup_steps finite norms; then `rule`, from the state start(them).

    The norms are collected raw; warmup_norm=inf is a warm-up that does nothing. A rule without a
    start of its own observes them one by one: start = lambda seen: run(rule, seen, its state)[1].
    """
    if not isinstance(state, WarmUp):
        return rule(n, state)
    c = _clip(n, warmup_norm)
    if not finite(n):
        return c, state
    seen = (*state.seen, n)
    return c, WarmUp(seen) if len(seen) < warmup_steps else start(seen)


CLIPPINGS: dict[str, Callable[[Real, Real], Real]] = {
    "max": lambda z, t: t,
    "mean": lambda z, t: 0,
    "reciprocal": lambda z, t: t * t / z,
}


def _f(clipping: Clipping) -> Callable[[Real, Real], Real]:
    """f(z, t): one of CLIPPINGS by name, or the caller's own function."""
    return CLIPPINGS[clipping] if isinstance(clipping, str) else clipping


class Moments(NamedTuple):
    """μ and v."""

    mean: Real
    var: Real


def moments(norms: Sequence[Real], unbiased: bool = True) -> Moments:
    """μ and v of a warm-up: z_stat starts from the unbiased variance, z_clip from the other."""
    variance = statistics.variance if unbiased else statistics.pvariance
    mean, var = statistics.mean(norms), variance(norms)
    return Moments(mean, var if math.sqrt(var) > TIE * mean else 0 * var)


def z_limit(n: Real, state: Moments, t: Real, clipping: Clipping, eps: Real) -> Real:
    """μ + f(z, t)·√v where z = (n − μ) / (√v + eps) exceeds t; else inf, as while v = 0."""
    std = math.sqrt(state.var)
    if not (_below(state.mean + t * (std + eps), n) and std > 0):
        return math.inf
    return state.mean + _f(clipping)((n - state.mean) / (std + eps), t) * std


def z_stat(
    n: Real,
    state: Moments,
    alpha: Real = 0.97,
    z_thresh: Real = 2.5,
    clipping: Clipping = "reciprocal",
    observe: str = "clipped",
) -> tuple[Real, Moments]:
    """min(n, z_limit); then v ← αv + (1 − α)(x − μ)², after it μ ← αμ + (1 − α)x.

    x is the clipped or the raw norm.
    """
    c = _clip(n, z_limit(n, state, z_thresh, clipping, 1e-8))
    if not finite(n):
        return c, state
    x = c if observe == "clipped" else n
    var = _blend(state.var, _deviation(x, state.mean) ** 2, alpha)
    return c, Moments(_blend(state.mean, x, alpha), var)


def z_clip(
    n: Real,
    state: Moments,
    alpha: Real = 0.97,
    z_thresh: Real = 2.5,
    max_norm: Real = 1,
    mode: str = "adaptive",
    skip_on_spike: bool = False,
) -> tuple[Real, Moments]:
    """c = min(n, z_limit); then μ ← αμ + (1 − α)c, after it v ← αv + (1 − α)(c − μ)².

    The modes "adaptive", "mean" and "percentile" limit a spike to μ + t²·√v/z, μ and μ + t·√v.
    max_norm bounds the output but not what is observed, or it would drag μ down to itself;
    skip_on_spike gives 0 in place of a limited norm, and observes the same.
    """
    clipping = {"adaptive": "reciprocal", "mean": "mean", "percentile": "max"}[mode]
    limit = z_limit(n, state, z_thresh, clipping, 1e-6)
    highest = math.inf if max_norm is None else max_norm
    if not finite(n):
        return _clip(n, min(limit, highest)), state
    c = min(n, limit)
    mean = _blend(state.mean, c, alpha)
    after = Moments(mean, _blend(state.var, _deviation(c, mean) ** 2, alpha))
    return 0 if skip_on_spike and c < n else min(c, highest), after


def ema_ratio(
    n: Real,
    mean: Real,
    alpha: Real = 0.98,
    r_thresh: Real = 1.05,
    clipping: Clipping = "max",
    observe: str = "raw",
) -> tuple[Real, Real]:
    """q = n / μ; where q > r, limit μ · (1 + f(q − 1, r − 1)); then μ ← αμ + (1 − α)x."""
    limit = math.inf
    if mean > 0 and _below(mean * r_thresh, n):
        limit = mean * (1 + _f(clipping)(n / mean - 1, r_thresh - 1))
    c = _clip(n, limit)
    if not finite(n):
        return c, mean
    return c, _blend(mean, c if observe == "clipped" else n, alpha)


class Powers(NamedTuple):
    """The EMAs of x, None before the first x, and of x²."""

    mean: Real = None
    square: Real = 0


def z_score_threshold(state: Powers, zmax: Real = 3) -> Real:
    """m + zmax · √(EMA of x² − m²), with m the EMA of x; inf before the first x."""
    if state.mean is None:
        return math.inf
    return state.mean + zmax * math.sqrt(max(state.square - state.mean**2, 0))


def z_score_clip(
    n: Real, state: Powers, zmax: Real = 3, ema_decay: Real = 0.99
) -> tuple[Real, Powers]:
    """min(n, z_score_threshold); then the EMAs of x and x² observe n, from the first n on.

    While all norms were equal the threshold is m itself, a variance of zero: no limit yet.
    """
    spread = 0 if state.mean is None else state.square - state.mean**2
    c = _clip(
        n, z_score_threshold(state, zmax) if spread > (TIE * (state.mean or 0)) ** 2 else math.inf
    )
    if not finite(n):
        return c, state
    if state.mean is None:
        return c, Powers(n, n**2)
    return c, Powers(_blend(state.mean, n, ema_decay), _blend(state.square, n**2, ema_decay))


# --- quantiles


def interpolated_quantile(xs: Vector, q: Real) -> Real:
    """The value at index q · (len − 1) of the ascending sorted xs, linear between neighbours."""
    ranked = sorted(xs)
    at = q * (len(ranked) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (at - below) * (ranked[above] - ranked[below])


def quantile(
    n: Real, norms: tuple[Real, ...], q: Real = 0.95, window: int = 1024
) -> tuple[Real, tuple[Real, ...]]:
    """min(n, the q-quantile of the last `window` norms); then n joins them."""
    limit = interpolated_quantile(norms, q) if norms else 0
    c = _clip(n, limit or math.inf)
    return c, (*norms, n)[-window:] if finite(n) else norms


class Markers(NamedTuple):
    """Heights, the sorted norms until there are five, and ranks, of which the last is the count."""

    heights: tuple[Real, ...] = ()
    positions: tuple[int, ...] = ()


def p2_observe(x: Real, state: Markers, q: Real) -> Markers:
    """The P² estimator: five markers keep near the ranks 1 + (count − 1)·(0, q/2, q, (1 + q)/2, 1).

    Jain and Chlamtac, 1985. A marker a whole rank off moves by one rank, its height along the
    parabola through its neighbours, or along a line where the parabola would leave their order.
    """
    if len(state.heights) < 5:
        return Markers(
            tuple(sorted((*state.heights, x))), (*state.positions, len(state.heights) + 1)
        )
    h = [min(x, state.heights[0]), *state.heights[1:4], max(x, state.heights[4])]
    k = [rank + _below(x, height) for rank, height in zip(state.positions, h, strict=True)]
    k[4] = state.positions[4] + 1
    for i, share in ((1, q / 2), (2, q), (3, (1 + q) / 2)):
        gap = 1 + (k[4] - 1) * share - k[i]
        d = 1 if gap > 0 else -1
        if abs(gap) < 1 or abs(k[i + d] - k[i]) <= 1:
            continue
        above, below = k[i + 1] - k[i], k[i] - k[i - 1]
        slope_above, slope_below = (h[i + 1] - h[i]) / above, (h[i] - h[i - 1]) / below
        bend = (below + d) * slope_above + (above - d) * slope_below
        moved = h[i] + d * bend / (above + below)
        if not h[i - 1] < moved < h[i + 1]:
            moved = h[i] + d * (slope_above if d > 0 else slope_below)
        h[i], k[i] = moved, k[i] + d
    return Markers(tuple(h), tuple(k))


def p2_estimate(state: Markers, q: Real) -> Real:
    """The middle marker; before five norms their interpolated quantile, 0 before any."""
    if len(state.heights) == 5:
        return state.heights[2]
    return interpolated_quantile(state.heights, q) if state.heights else 0


def p2_quantile(n: Real, state: Markers, q: Real = 0.5) -> tuple[Real, Markers]:
    """min(n, the P² estimate of the q-quantile); then the markers observe n."""
    c = _clip(n, p2_estimate(state, q) or math.inf)
    return c, p2_observe(n, state, q) if finite(n) else state


class Tracked(NamedTuple):
    """Q, None before the first norm, and s, the EMA of |n − Q|."""

    quantile: Real = None
    spread: Real = 0


def ema_quantile(
    n: Real, state: Tracked, q: Real = 0.95, ema_decay: Real = 0.99
) -> tuple[Real, Tracked]:
    """min(n, Q); then s ← EMA of |n − Q|, after it Q ← Q + (1 − ema_decay) · s · (q − 1[n < Q]).

    Q starts as the first norm, s as 0; Q stops at 0, which no norm is below.
    """
    c = _clip(n, state.quantile or math.inf)
    if not finite(n):
        return c, state
    if state.quantile is None:
        return c, Tracked(n)
    spread = _blend(state.spread, abs(n - state.quantile), ema_decay)
    step = (1 - ema_decay) * spread * (q - _below(n, state.quantile))
    return c, Tracked(max(state.quantile + step, 0), spread)


def geometric_quantile(
    n: Real, quantile: Real, q: Real = 0.5, rate: Real = 0.2
) -> tuple[Real, Real]:
    """min(n, Q); then Q ← Q · exp(rate · (q − 1[n ≤ Q])), the first norm where Q is 0."""
    c = _clip(n, quantile or math.inf)
    if not finite(n) or not quantile:
        return c, n if finite(n) else quantile
    small = n * 2**20 <= quantile * (2**20 + 1)
    return c, quantile * math.exp(rate * (q - small))


class Record(NamedTuple):
    """The markers of P², and Welford's count, mean and Σ(x − mean)²."""

    markers: Markers = Markers()
    steps: int = 0
    mean: Real = 0
    m2: Real = 0


def auto_clip(n: Real, state: Record) -> tuple[Real, Record]:
    """min(n, P² median + 3 · std), std unbiased, by Welford; then both observe n.

    This is mode "auto"; mode "percentile" is `quantile` or `ema_quantile` at percentile / 100.
    """
    limit = math.inf
    std = math.sqrt(state.m2 / (state.steps - 1)) if state.steps > 1 else 0
    if std > TIE * state.mean:
        limit = p2_estimate(state.markers, 0.5) + 3 * std
    c = _clip(n, limit)
    if not finite(n):
        return c, state
    steps = state.steps + 1
    mean = state.mean + (n - state.mean) / steps
    m2 = state.m2 + (n - state.mean) * (n - mean)
    return c, Record(p2_observe(n, state.markers, 0.5), steps, mean, m2)


# --- AdaGC


class Reference(NamedTuple):
    """γ, inf until a non-zero norm has been seen, and the steps taken."""

    gamma: Real = math.inf
    steps: int = 0


def ada_gc(
    n: Real,
    state: Reference,
    rel: Real = 1.05,
    absolute: Real = 1,
    beta: Real = 0.98,
    warmup_steps: int = 100,
    total: Real = None,
) -> tuple[Real, Reference]:
    """t < warmup_steps: ĝ = n · min(1, absolute / total), γ ← min(γ, ĝ).

    From then on ĝ = min(n, rel · γ), γ ← βγ + (1 − β)ĝ. t counts from 1, `total` is the global
    norm, n itself by default, and γ ignores a ĝ of zero; the first other ĝ is its start.
    """
    gamma, t = state.gamma, state.steps + 1
    warming = t < warmup_steps
    measured = total if warming and total is not None else n
    limit = absolute if warming else math.inf if gamma == math.inf else rel * gamma
    c = n if measured <= limit or limit == math.inf else n / measured * limit
    if not (finite(n) and finite(measured)):
        return c, state
    if c == 0:
        return c, Reference(gamma, t)
    if warming or gamma == math.inf:
        return c, Reference(min(gamma, c), t)
    return c, Reference(_blend(gamma, c, beta), t)


# --- guards


class SpikeState(NamedTuple):
    """The last values that counted, and how many steps in a row were skipped."""

    values: tuple[Real, ...] = ()
    row: int = 0


def skip_spike(
    x: Real,
    state: SpikeState,
    sigmas: Real = 6,
    window: int = 128,
    least: int = 64,
    patience: int = 20,
    keep_skipped: bool = False,
) -> tuple[bool, SpikeState]:
    """Whether the step happens: not where x - mean > sigmas · std of at least `least` values.

    std is unbiased, and sets no limit where it is 0; an x that is no number does not happen. What
    happened counts, and what was skipped after `patience` others in a row; a NaN never does.
    """
    happens = finite(x)
    if happens and len(state.values) >= max(least, 2):
        var, away = statistics.variance(state.values), x - statistics.mean(state.values)
        happens = not (var > 0 and away > 0 and away * away > sigmas * sigmas * var)
    row = 0 if happens else state.row + 1
    counts = finite(x) and (happens or row > patience or keep_skipped)
    values = (*state.values, x)[-window:] if counts else state.values
    return happens, SpikeState(values, row)
