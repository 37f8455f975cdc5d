"""Rules whose limit comes from averages of past norms.

The limit depends on past norms only. After clipping, the rule observes the current norm. As long as
the mean or the variance is zero, there is no limit.
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
"""The functions f(z, t), by name. A score z above the threshold t is clipped to f(z, t)."""


class WarmUp(NamedTuple):
    """The norms that the warm-up has collected so far. They are norms before clipping."""

    seen: tuple[Real, ...] = ()


def adaptive_clip(
    n: Real,
    state: WarmUp | S,
    rule: Callable[[Real, S], tuple[Real, S]],
    start: Callable[[Sequence[Real]], S],
    warmup_steps: int = 20,
    warmup_norm: Real = 1,
) -> tuple[Real, WarmUp | S]:
    """Return min(n, warmup_norm) for the first warmup_steps finite norms, then apply `rule`.

    The norms are collected before clipping. With warmup_norm=inf the warm-up does not clip. After
    the warm-up, the state of the rule is start(norms). A rule without a special start observes the
    norms one by one: start = lambda seen: run(rule, seen, its state)[1].
    """
    if not isinstance(state, WarmUp):
        return rule(n, state)
    c = limited(n, warmup_norm)
    if not finite(n):
        return c, state
    seen = (*state.seen, n)
    return c, WarmUp(seen) if len(seen) < warmup_steps else start(seen)


def _f(clipping: Clipping) -> Callable[[Real, Real], Real]:
    """Return the function f(z, t): an entry of CLIPPINGS by its name, or a custom function."""
    return CLIPPINGS[clipping] if isinstance(clipping, str) else clipping


class Moments(NamedTuple):
    """The mean μ and the variance v."""

    mean: Real
    var: Real


def moments(norms: Sequence[Real], unbiased: bool = True) -> Moments:
    """Return μ and v of the norms of a warm-up.

    z_stat starts with the unbiased variance, z_clip with the biased variance.
    """
    variance = statistics.variance if unbiased else statistics.pvariance
    mean = statistics.mean(norms)
    var = variance(norms)
    return Moments(mean, var if math.sqrt(var) > TIE * mean else 0 * var)


def z_limit(n: Real, state: Moments, t: Real, clipping: Clipping, eps: Real) -> Real:
    """Return the limit μ + f(z, t)·√v if the score z = (n − μ) / (√v + eps) exceeds t, else inf.

    If v = 0, the limit is inf as well.
    """
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
    """Return min(n, z_limit); then v ← αv + (1 − α)(x − μ)², and after it μ ← αμ + (1 − α)x.

    x is the norm after clipping if observe="clipped", otherwise the norm before it.
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
    """Compute c = min(n, z_limit); then μ ← αμ + (1 − α)c, and after it v ← αv + (1 − α)(c − μ)².

    The modes "adaptive", "mean" and "percentile" limit a spike to μ + t²·√v/z, μ and μ + t·√v.

    max_norm bounds the output but not the observed norm. Otherwise max_norm would pull μ down to
    max_norm. With skip_on_spike, a norm above the limit becomes 0. The rule still observes the same
    norm.
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
    """Limit n to μ · (1 + f(q − 1, r − 1)) if q = n / μ exceeds r; then μ ← αμ + (1 − α)x.

    x is the norm before clipping if observe="raw", otherwise the norm after it.
    """
    limit = math.inf
    if mean > 0 and is_below(mean * r_thresh, n):
        limit = mean * (1 + _f(clipping)(n / mean - 1, r_thresh - 1))
    c = limited(n, limit)
    if not finite(n):
        return c, mean
    return c, blend(mean, c if observe == "clipped" else n, alpha)


class Powers(NamedTuple):
    """The EMA of x and the EMA of x². The EMA of x is None before the first x."""

    mean: Real = None
    square: Real = 0


def z_score_threshold(state: Powers, zmax: Real = 3) -> Real:
    """Return m + zmax · √(EMA of x² − m²), where m is the EMA of x; inf before the first x."""
    if state.mean is None:
        return math.inf
    return state.mean + zmax * math.sqrt(max(state.square - state.mean**2, 0))


def z_score_clip(
    n: Real, state: Powers, zmax: Real = 3, ema_decay: Real = 0.99
) -> tuple[Real, Powers]:
    """Return min(n, z_score_threshold); then the EMAs of x and x² observe n, from the first n on.

    As long as all norms are equal, the variance is zero and there is no limit.
    """
    spread = 0 if state.mean is None else state.square - state.mean**2
    limit = math.inf
    if spread > (TIE * (state.mean or 0)) ** 2:
        limit = z_score_threshold(state, zmax)
    c = limited(n, limit)
    if not finite(n):
        return c, state
    if state.mean is None:
        return c, Powers(n, n**2)
    return c, Powers(blend(state.mean, n, ema_decay), blend(state.square, n**2, ema_decay))


class Reference(NamedTuple):
    """The reference γ and the number of steps. γ is inf before the first nonzero norm."""

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
    """Compute ĝ = n · min(1, absolute / total), γ ← min(γ, ĝ) while t < warmup_steps.

    From then on ĝ = min(n, rel · γ), γ ← βγ + (1 − β)ĝ. t counts from 1. `total` is the global
    norm, by default n itself. γ starts at the first nonzero ĝ. A ĝ of zero does not change γ.
    """
    gamma = state.gamma
    t = state.steps + 1
    warming = t < warmup_steps
    measured = total if warming and total is not None else n
    if warming:
        limit = absolute
    elif gamma == math.inf:
        limit = math.inf
    else:
        limit = rel * gamma
    c = n if measured <= limit or limit == math.inf else n / measured * limit
    if not (finite(n) and finite(measured)):
        return c, state
    if c == 0:
        return c, Reference(gamma, t)
    if warming or gamma == math.inf:
        return c, Reference(min(gamma, c), t)
    return c, Reference(blend(gamma, c, beta), t)
