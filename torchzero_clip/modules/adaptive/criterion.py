"""Criterion: how past norms set the limit of this step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core import Description, Group, UnitState

Clipping: TypeAlias = "Literal['reciprocal', 'mean', 'max'] | Callable[[Tensor, Any], Tensor | Any]"


class Criterion(Description):
    """A statistic of past norms and the limit it sets, one entry a unit: tensors in, tensors out.

    Write `init_unit`, `limit` and `observe`, as in a `NormRule`, and `start` where the statistic
    begins from the mean and variance of the warm-up. A criterion never sees NaN or infinity in
    `observe`, and a limit of inf clips nothing.
    """

    observes: ClassVar[Literal["raw", "clipped"]] = "raw"
    least_warmup: ClassVar[int] = 0

    def init_unit(self) -> dict[str, Any]:
        """The state of one unit before its first norm."""
        raise NotImplementedError(f"{type(self).__name__} has no init_unit")

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        """The state after `count` warm-up norms of this mean and unbiased variance."""
        return {}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        """The norm that each unit may have, from the past alone."""
        raise NotImplementedError(f"{type(self).__name__} has no limit")

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        """The state after this norm."""
        raise NotImplementedError(f"{type(self).__name__} has no observe")


def max_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """t: a spike is cut to the threshold."""
    return t


def mean_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """0: a spike is cut to the mean."""
    return 0.0


def reciprocal_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """t² / z: the larger the spike, the closer to the mean it is cut."""
    return t * t / z


TIE = 2.0**-20
"""Numbers that differ by no more than this share are equal: eight units in float32's last place.

Norms are right to about that. Where a comparison decides a jump, as of a rank, rounding must not:
one machine, or one way to run a chain, would go where another does not.
"""
CLIPPINGS = {"max": max_clipping, "mean": mean_clipping, "reciprocal": reciprocal_clipping}


def clipping_function(clipping: Clipping) -> Callable[[Tensor, Any], Tensor | Any]:
    """A clipping function by its name, or itself."""
    return clipping if callable(clipping) else CLIPPINGS[clipping]


def check_clipping(criterion: Any) -> None:
    """Raise a sentence unless `clipping` is a function or the name of one."""
    given = criterion.clipping
    if not callable(given) and not (isinstance(given, str) and given in CLIPPINGS):
        raise ValueError(
            f"{type(criterion).__name__}: clipping must be one of {list(CLIPPINGS)} or a function "
            f"of (z, threshold), got {given!r}"
        )


def blend_squares(old: Tensor, new: Tensor, keep: float | Tensor) -> Tensor:
    """√(keep · old² + (1 - keep) · new²): the root is kept, as its range is that of norms."""
    return blend(old * old, new * new, keep).sqrt()


def blend(old: Tensor, new: Tensor, keep: float | Tensor) -> Tensor:
    """keep · old + (1 - keep) · new, exactly `old` where both are equal."""
    return old + (1 - keep) * (new - old)


def none_yet(limit: Tensor, statistic: Tensor, scale: Tensor | float = 0.0) -> Tensor:
    """No limit where a statistic is still zero, up to the rounding of numbers of that scale."""
    return torch.where(statistic > TIE * scale, limit, torch.full_like(limit, math.inf))


def below(x: Tensor, y: Tensor) -> Tensor:
    """Whether a norm x is less than y, and not equal up to rounding."""
    return x < y * (1 - TIE)


def deviation(x: Tensor, mean: Tensor) -> Tensor:
    """x - mean, 0 where they are equal up to rounding."""
    away = x - mean
    return torch.where(away.abs() <= TIE * mean, torch.zeros_like(away), away)


def at_most(x: Tensor, y: Tensor) -> Tensor:
    """Whether a norm x is no more than y, up to rounding; NaN never is."""
    return x <= y * (1 + TIE)
