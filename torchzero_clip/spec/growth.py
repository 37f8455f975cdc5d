"""Rules that limit how fast a norm, or an element, may grow."""

from __future__ import annotations

import math
from typing import NamedTuple

from torchzero_clip.spec.arithmetic import limited
from torchzero_clip.spec.plain_numbers import Real, finite
from torchzero_clip.spec.without_state import clip_value


class Growth(NamedTuple):
    """The previous norm p. It is inf before the first nonzero norm."""

    previous: Real = math.inf


def growth_limit(state: Growth, add: Real = None, mul: Real = 1.5, min_value: Real = 1e-4) -> Real:
    """Return L = min(p + add, max(p, min_value) · mul).

    If `add` or `mul` is None, its term is skipped. Before the first nonzero norm, L is inf.
    """
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
    """Compute c = min(n, L); p ← max(c, p / max_decay), with L from growth_limit.

    `add` or `mul` may be None, but not both. With max_decay=inf the bound falls as fast as the
    norm.
    """
    p = state.previous
    c = limited(n, growth_limit(state, add, mul, min_value))
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
    """Apply clip_norm_growth to |x|, where x is one element, and keep the sign of x.

    ±inf is clamped to the limit.
    """
    limit = growth_limit(state, add, mul, min_value)
    _, after = clip_norm_growth(abs(x), state, add, mul, min_value, max_decay)
    return clip_value([x], -limit, limit)[0], after
