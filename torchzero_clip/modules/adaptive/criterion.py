"""Criterion: the base class of statistics that compute a limit from past norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core import Description, Group, UnitState

Clipping: TypeAlias = "Literal['reciprocal', 'mean', 'max'] | Callable[[Tensor, Any], Tensor | Any]"


class Criterion(Description):
    """A criterion for `AdaptiveClip`: it keeps a statistic of past norms and computes a limit.

    A subclass defines `init_unit`, `limit` and `observe`. If the statistic starts from the mean and
    variance of the warm-up, the subclass also defines `start`. All methods receive and return
    tensors with one element per unit. A unit is a tensor, a layer, a parameter group or the whole
    model.

    `observe` never receives NaN or infinity. If the limit is infinity, nothing is clipped.
    """

    observes: ClassVar[Literal["raw", "clipped"]] = "raw"
    least_warmup: ClassVar[int] = 0

    def init_unit(self) -> dict[str, Any]:
        """Return the state of one unit before its first norm."""
        raise NotImplementedError(f"{type(self).__name__} must define init_unit")

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        """Return the state after `count` warm-up norms with this mean and unbiased variance."""
        return {}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        """Return the largest allowed norm of each unit, computed from past norms."""
        raise NotImplementedError(f"{type(self).__name__} must define limit")

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        """Return the new state after the norm of this step."""
        raise NotImplementedError(f"{type(self).__name__} must define observe")


def max_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """Return t, which clips a spike to the threshold."""
    return t


def mean_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """Return 0, which clips a spike to the mean."""
    return 0.0


def reciprocal_clipping(z: Tensor, t: float | Tensor) -> Tensor | float:
    """Return t² / z, which clips a larger spike closer to the mean."""
    return t * t / z


TIE = 2.0**-20
"""The relative difference up to which two norms count as equal: eight ULP of float32.

The rounding error of a norm is about as large. Some comparisons make a statistic jump. If rounding
decided such a comparison, two machines or two engines would compute different limits.
"""
CLIPPINGS = {"max": max_clipping, "mean": mean_clipping, "reciprocal": reciprocal_clipping}


def clipping_function(clipping: Clipping) -> Callable[[Tensor, Any], Tensor | Any]:
    """Return the clipping function with this name, or the function itself."""
    return clipping if callable(clipping) else CLIPPINGS[clipping]


def check_clipping(criterion: Any) -> None:
    """Raise ValueError unless `clipping` is a function or the name of a clipping function."""
    clipping = criterion.clipping
    if not callable(clipping) and not (isinstance(clipping, str) and clipping in CLIPPINGS):
        raise ValueError(
            f"{type(criterion).__name__}: clipping must be one of {list(CLIPPINGS)} or a function "
            f"of (z, threshold), got {clipping!r}"
        )


def blend_squares(old: Tensor, new: Tensor, keep: float | Tensor) -> Tensor:
    """Return √(keep · old² + (1 - keep) · new²).

    The state stores the root, because squares could overflow. If `keep` is 0, the result is `new`,
    even if `old` is huge.
    """
    return (keep * old**2 + (1 - keep) * new**2).sqrt()


def blend(old: Tensor, new: Tensor, keep: float | Tensor) -> Tensor:
    """Return keep · old + (1 - keep) · new, and exactly `old` if both are equal."""
    return old + (1 - keep) * (new - old)


def none_yet(limit: Tensor, statistic: Tensor, scale: Tensor | float = 0.0) -> Tensor:
    """Return the limit, or infinity if the statistic is zero up to rounding at this scale."""
    return torch.where(statistic > TIE * scale, limit, torch.full_like(limit, math.inf))


def below(x: Tensor, y: Tensor) -> Tensor:
    """Return whether a norm x is less than y by more than rounding."""
    return x < y * (1 - TIE)


def deviation(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean, or 0 if both are equal up to rounding."""
    difference = x - mean
    return torch.where(difference.abs() <= TIE * mean, torch.zeros_like(difference), difference)


def at_most(x: Tensor, y: Tensor) -> Tensor:
    """Return whether a norm x is at most y, up to rounding. The result for NaN is False."""
    return x <= y * (1 + TIE)
