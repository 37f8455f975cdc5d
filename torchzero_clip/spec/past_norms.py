"""Limits from averages of past norms.

The past sets the limit, then this norm is observed. A mean or a variance of zero sets none yet.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from torchzero_clip.spec.arithmetic import TIE, blend, deviation, is_below, limited
from torchzero_clip.spec.plain_numbers import Real, S, finite

Clipping: TypeAlias = str | Callable[[Real, Real], Real]

CLIPPINGS: dict[str, Callable[[Real, Real], Real]] = {
    "max": lambda z, t: t,
    "mean": lambda z, t: 0,
    "reciprocal": lambda z, t: t * t / z,
}


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
    c = limited(n, warmup_norm)
    if not finite(n):
        return c, state
    seen = (*state.seen, n)
    return c, WarmUp(seen) if len(seen) < warmup_steps else start(seen)


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
    if not (is_below(state.mean + t * (std + eps), n) and std > 0):
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
    c = limited(n, z_limit(n, state, z_thresh, clipping, 1e-8))
    if not finite(n):
        return c, state
    x = c if observe == "clipped" else n
    var = blend(state.var, deviation(x, state.mean) ** 2, alpha)
    return c, Moments(blend(state.mean, x, alpha), var)


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
        return limited(n, min(limit, highest)), state
    c = min(n, limit)
    mean = blend(state.mean, c, alpha)
    after = Moments(mean, blend(state.var, deviation(c, mean) ** 2, alpha))
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
    if mean > 0 and is_below(mean * r_thresh, n):
        limit = mean * (1 + _f(clipping)(n / mean - 1, r_thresh - 1))
    c = limited(n, limit)
    if not finite(n):
        return c, mean
    return c, blend(mean, c if observe == "clipped" else n, alpha)


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
    c = limited(
        n, z_score_threshold(state, zmax) if spread > (TIE * (state.mean or 0)) ** 2 else math.inf
    )
    if not finite(n):
        return c, state
    if state.mean is None:
        return c, Powers(n, n**2)
    return c, Powers(blend(state.mean, n, ema_decay), blend(state.square, n**2, ema_decay))


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
    return c, Reference(blend(gamma, c, beta), t)
