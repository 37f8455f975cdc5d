"""Decision: what a norm rule makes of norms, from vectors alone: no tensor is read or written.

A step, the helpers, `simulate`, `release` and `to_source` all ask `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.norms import finite, known_divisor

UnitState: TypeAlias = dict[str, Tensor]
"""The state of a norm rule: for each name that `init_unit` makes, a vector with an entry a unit."""


class Decision(NamedTuple):
    """What a norm rule makes of norms: vectors with an entry a unit."""

    norm: Tensor
    limits: Sequence[Tensor | float]
    """For every group the norms that its tensors may have."""
    divisors: list[Tensor]
    """For every group what its tensors are divided by; 1 where a unit stays as it is."""
    state: UnitState
    """The state after this step; as it was where a norm is no number."""


class Limiting(Protocol):
    """All that a decision knows of a norm rule."""

    min_size: int

    @property
    def sets_norm(self) -> bool: ...

    def limit(self, norm: Tensor, state: UnitState, group: dict[str, Any]) -> Tensor | float: ...

    def observe(
        self, norm: Tensor, clipped: Tensor, state: UnitState, group: dict[str, Any]
    ) -> UnitState: ...


class Cells:
    """Units as a decision sees them: here of one group, with norms that grow as tensors do."""

    dtype = torch.float64
    """The precision of their state."""
    degree = 1
    """The power of a factor of the tensors with which their norms grow."""

    def ratio(self, norm: Tensor, limit: Tensor | float) -> Tensor:
        """norm / limit in terms of the tensors."""
        ratio = norm / limit
        return ratio.sqrt() if self.degree == 2 else ratio

    def comparable(self, limit: Tensor | float, norm: Tensor) -> Tensor | float:
        """A limit as norms are compared with it: to compare a number would fix it in a graph."""
        if not isinstance(limit, Tensor) and torch.compiler.is_compiling():
            return torch.full_like(norm, limit)
        return limit if isinstance(limit, Tensor) else float(limit)

    def too_small(self, size: int) -> Tensor | None:
        """A flag a unit where some have fewer elements."""
        return None

    def after(self, norm: Tensor, divisors: Sequence[Tensor]) -> Tensor:
        """The norms of the units once the tensors of each group are divided."""
        factor = self.of_first_group(divisors)
        return norm / (factor if self.degree == 1 else factor**self.degree)

    def finite(self, norm: Tensor) -> Tensor:
        """A flag a unit: whether its norm is a number, in the precision of state."""
        return finite(norm.to(self.dtype))

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """One vector from one a group: a unit in several groups has the entry of the first."""
        return vectors[0]


def decide(
    rule: Limiting, norm: Tensor, state: UnitState, groups: Sequence[dict[str, Any]], cells: Cells
) -> Decision:
    """The decision of a rule about norms, from its state and the live values of every group."""
    if state:  # compare with the past in the precision that it was kept in
        norm = norm.to(cells.dtype).to(norm.dtype)
    limits = [rule.limit(norm, state, group) for group in groups]
    divisors = [divisor(rule, norm, limit, cells) for limit in limits]
    now = Decision(norm, limits, divisors, state)
    return now._replace(state=_remembered(rule, now, groups, cells)) if state else now


def divisor(rule: Limiting, norm: Tensor, limit: Tensor | float, cells: Cells) -> Tensor:
    """What a unit is divided by for its norm to meet the limit; 1 where it stays as it is."""
    if limit is None:
        raise TypeError(f"{type(rule).__name__}.limit must return a tensor or a number, got None")
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
    """The state that `observe` returns, for the units whose norm is a number."""
    norm, state, clipped = now.norm, now.state, cells.after(now.norm, now.divisors)
    made = [rule.observe(norm, clipped, dict(state), group) for group in groups]
    _check_observed(rule, made[0], state)
    known = cells.finite(norm) & finite(clipped)
    after = dict(state)
    for name in made[0]:
        old, new = state[name], cells.of_first_group([one[name] for one in made])
        mask = known.view(-1, *[1] * (old.dim() - 1))
        after[name] = torch.where(mask, new.to(old.dtype), old)
    return after


def _check_observed(rule: Limiting, made: Any, state: Mapping[str, Tensor]) -> None:
    name = type(rule).__name__
    if not isinstance(made, dict):
        raise TypeError(f"{name}.observe must return a dict, got {made!r}")
    if not made.keys() <= state.keys():
        raise KeyError(
            f"{name}.observe returned {sorted(made.keys() - state.keys())}, which init_unit does "
            f"not make; it makes {sorted(state)}"
        )
