"""Limits from an average of what has flowed: its norm, or its entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torchzero_clip.spec.arithmetic import blend, rescaled
from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite, norm
from torchzero_clip.spec.without_state import clip_by, clip_value, normalize


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
    mean = [blend(m, x, beta) for m, x in zip(state.mean or first, xs, strict=True)]
    e = norm(mean, ord)
    most = math.inf if max_ema_growth is None else state.norm * max_ema_growth
    if state.norm > 0 and e > most:
        mean, e = rescaled(mean, e, most, ord), most
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
        seen = abs(x) if m == math.inf else blend(m, abs(x), beta)
        mean.append(seen if finite(x) else m)
    bounds = mean if ema_tfm is None else ema_tfm(list(mean))
    output = [clip_value([x], -abs(b), abs(b))[0] for x, b in zip(xs, bounds, strict=True)]
    return output, tuple(mean)
