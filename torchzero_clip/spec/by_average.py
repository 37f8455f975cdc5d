"""Rules whose limit is the norm, or the elements, of an average of past updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torchzero_clip.spec.arithmetic import blend, rescaled
from torchzero_clip.spec.plain_numbers import Order, Real, Vector, finite, norm
from torchzero_clip.spec.without_state import clip_by, clip_value, normalize


class Average(NamedTuple):
    """The average m, which has the shape of u, and the last nonzero norm e of m."""

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
    """Compute m ← βm + (1 − β)u; u · min(1, max(e, eps) / n), with e = ‖m‖ and n = ‖u‖.

    If e exceeds max_ema_growth times the last nonzero e, m is scaled down so that e equals this
    bound. max_ema_growth=None means no bound. m starts at 0, or at the first u for "update". If u
    is not finite, the limit is the last nonzero e, and the state does not change.
    """
    if not all(map(finite, xs)):
        return rule(xs, max(state.norm, eps), ord), state
    first = xs if ema_init == "update" else [0] * len(xs)
    mean = [blend(m, x, beta) for m, x in zip(state.mean or first, xs, strict=True)]
    e = norm(mean, ord)
    bound = math.inf if max_ema_growth is None else state.norm * max_ema_growth
    if state.norm > 0 and e > bound:
        mean = rescaled(mean, e, bound, ord)
        e = bound
    return rule(xs, max(e, eps), ord), Average(tuple(mean), e or state.norm)


def normalize_by_ema(
    xs: Vector, state: Average, **hyperparameters: Any
) -> tuple[list[Real], Average]:
    """Compute u · max(e, eps) / n, with the arguments and the state of clip_norm_by_ema."""
    return clip_norm_by_ema(xs, state, **hyperparameters, rule=normalize)


def clip_value_by_ema(
    xs: Vector,
    state: tuple[Real, ...],
    beta: Real = 0.99,
    ema_init: str = "zeros",
    ema_tfm: Callable[[list[Real]], Vector] | None = None,
) -> tuple[list[Real], tuple[Real, ...]]:
    """Compute m ← βm + (1 − β)|u| elementwise; clamp u to ±m, or to ±|ema_tfm(m)|.

    m starts at 0. With ema_init="update", an element of m starts at the first finite |u| of this
    element, and is inf before. If an element of u is not finite, the same element of m does not
    change. ±inf is clamped to ±m.
    """
    start = math.inf if ema_init == "update" else 0
    mean = []
    for x, m in zip(xs, state or [start] * len(xs), strict=True):
        if not finite(x):
            mean.append(m)
        elif m == math.inf:
            mean.append(abs(x))
        else:
            mean.append(blend(m, abs(x), beta))
    bounds = mean if ema_tfm is None else ema_tfm(list(mean))
    output = [clip_value([x], -abs(b), abs(b))[0] for x, b in zip(xs, bounds, strict=True)]
    return output, tuple(mean)
