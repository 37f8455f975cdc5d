"""Decision: the limits and divisors that a norm rule computes from norms.

`decide` receives and returns vectors. It reads and writes no tensor of the model. Steps, the
functions without an optimizer, `simulate`, `release` and `to_source` all call it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.names import UnknownKey
from torchzero_clip.core.norms import finite, known_divisor

UnitState: TypeAlias = dict[str, Tensor]
"""The state of a norm rule: for each name of `init_unit`, a vector with an element per unit."""


class Decision(NamedTuple):
    """The limits, divisors and state of a norm rule in one step, as vectors over the units."""

    norm: Tensor
    """The norm of each unit before the rule."""
    limits: Sequence[Tensor | float]
    """For each group, a vector with the largest norm that each unit may have, or one number."""
    divisors: list[Tensor]
    """For each group, the divisor of each unit. It is 1 if the unit does not change."""
    state: UnitState
    """The state after this step. Units with an infinite or NaN norm keep their old state."""


class Limiting(Protocol):
    """The attributes and methods of a norm rule that `decide` uses."""

    min_size: int

    @property
    def sets_norm(self) -> bool: ...

    def limit(self, norm: Tensor, state: UnitState, group: dict[str, Any]) -> Tensor | float: ...

    def observe(
        self, norm: Tensor, clipped: Tensor, state: UnitState, group: dict[str, Any]
    ) -> UnitState: ...


class Cells:
    """The attributes and methods of units that `decide` uses.

    This base class is for the units of one group.
    """

    dtype = torch.float64
    """The dtype of the units' state."""
    degree = 1
    """If all tensors are multiplied by c, their norms are multiplied by |c| to this power."""

    def ratio(self, norm: Tensor, limit: Tensor | float) -> Tensor:
        """Return the divisor of the tensors that changes their norm to the limit."""
        ratio = norm / limit
        return ratio.sqrt() if self.degree == 2 else ratio

    def comparable(self, limit: Tensor | float, norm: Tensor) -> Tensor | float:
        """Return a limit in a form that can be compared with norms.

        Under torch.compile, a number is converted to a vector. Without the conversion, the number
        would become a constant of the graph.
        """
        if not isinstance(limit, Tensor) and torch.compiler.is_compiling():
            return torch.full_like(norm, limit)
        return limit if isinstance(limit, Tensor) else float(limit)

    def too_small(self, size: int) -> Tensor | None:
        """Return a flag for each unit: whether the unit has fewer than `size` elements.

        Return None if no unit has fewer elements.
        """
        return None

    def after(self, norm: Tensor, divisors: Sequence[Tensor]) -> Tensor:
        """Return the norms of the units after the tensors of each group have been divided."""
        factor = self.of_first_group(divisors)
        return norm / (factor if self.degree == 1 else factor**self.degree)

    def finite(self, norm: Tensor) -> Tensor:
        """Return a flag for each unit: whether its norm is finite in the dtype of state."""
        return finite(norm.to(self.dtype))

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """Join one vector per group into one vector. A unit uses the vector of its first group."""
        return vectors[0]


def decide(
    rule: Limiting, norm: Tensor, state: UnitState, groups: Sequence[dict[str, Any]], cells: Cells
) -> Decision:
    """Return the decision of a rule about norms.

    Args:
        rule: The rule.
        norm: The norm of each unit.
        state: The state of the rule before this step.
        groups: The hyperparameters of each group.
        cells: The units.
    """
    if state:  # the norm is compared with state, so it is rounded to the dtype of state
        norm = norm.to(cells.dtype).to(norm.dtype)
    limits = [rule.limit(norm, state, group) for group in groups]
    divisors = [divisor(rule, norm, limit, cells) for limit in limits]
    now = Decision(norm, limits, divisors, state)
    return now._replace(state=_remembered(rule, now, groups, cells)) if state else now


def divisor(rule: Limiting, norm: Tensor, limit: Tensor | float, cells: Cells) -> Tensor:
    """Return the divisor of each unit: 1 if its norm is within the limit, otherwise norm / limit.

    If the rule sets norms, smaller norms are scaled up to the limit as well.
    """
    if not isinstance(limit, Tensor) and not hasattr(limit, "__float__"):
        raise TypeError(
            f"{type(rule).__name__}.limit must return a tensor or a number, got {limit!r}"
        )
    computed = isinstance(limit, Tensor)
    small = cells.too_small(rule.min_size)
    if not isinstance(limit, Tensor) and small is None:
        known = known_divisor(norm, limit, rule.sets_norm, cells.degree)
        if known is not None:
            return known
    limit = cells.comparable(limit, norm)
    stays = norm == 0 if rule.sets_norm else norm <= limit
    if computed and not rule.sets_norm:
        stays = (norm == 0) | stays  # also where the limit is 0 / 0
    if isinstance(limit, Tensor) or limit == math.inf:
        stays = stays | (limit == math.inf)
    ratio = cells.ratio(norm, limit)
    if norm.device.type == "cpu":
        ratio = torch.where(stays, 1, ratio)
    else:  # where that is two calls
        ratio = ratio.masked_fill(stays, 1)
    return ratio if small is None else ratio.masked_fill(small, 1)


def _remembered(
    rule: Limiting, now: Decision, groups: Sequence[dict[str, Any]], cells: Cells
) -> UnitState:
    """Return the state after this step: the result of `observe` for the units with finite norms."""
    norm = now.norm
    state = now.state
    clipped = cells.after(norm, now.divisors)
    observed = [rule.observe(norm, clipped, dict(state), group) for group in groups]
    for of_group in observed:
        _check_observed(rule, of_group, state)
    known = cells.finite(norm) & finite(clipped)
    after = dict(state)
    for name in dict.fromkeys([name for of_group in observed for name in of_group]):
        old = state[name]
        new = cells.of_first_group([of_group.get(name, old) for of_group in observed])
        trailing = [1] * (old.dim() - 1)
        mask = known.view(-1, *trailing)
        after[name] = torch.where(mask, new.to(old.dtype), old)
    return after


def _check_observed(rule: Limiting, observed: Any, state: Mapping[str, Tensor]) -> None:
    """Raise an error unless `observe` has returned a dict with known names and shapes."""
    name = type(rule).__name__
    if not isinstance(observed, dict):
        raise TypeError(f"{name}.observe must return a dict, got {observed!r}")
    if not observed.keys() <= state.keys():
        unknown = sorted(observed.keys() - state.keys())
        raise UnknownKey(
            f"{name}.observe returned the keys {unknown}, but init_unit has only the keys "
            f"{sorted(state)}"
        )
    for key, value in observed.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}.observe must return tensors, got {value!r} for {key!r}")
        shape = state[key].shape
        if value.shape not in (shape, torch.Size(), torch.Size([1])):
            raise ValueError(
                f"{name}.observe must return one number or a tensor with shape {tuple(shape)} for "
                f"{key!r}, got a tensor with shape {tuple(value.shape)}"
            )
