"""Clipping rules that never clip, because an earlier link already bounds the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.norms import measure
from torchzero_clip.core.traits import Bounding

SCOPES = (None, "layer", "group", "global")
"""The scopes of norms, from one tensor to the whole model. Slices are not in this list."""


class Bound(NamedTuple):
    """A bound of the update: no norm of some kind and scope is larger than a limit.

    Attributes:
        link: The link whose updates have the bound.
        power: The p of a p-norm, infinity for the largest entry, NaN for the root mean square.
        scope: The scope of the norm, or the dims of slices.
        limit: The bound.
        exact: Whether the link sets norms to a value. A looser limit after the link then has no
            effect.
    """

    link: Link
    power: float
    scope: Any
    limit: float
    exact: bool

    @property
    def noun(self) -> str:
        """The noun for the bounded quantity, for messages."""
        if self.power == math.inf:
            return "elements"
        return "root mean squares" if math.isnan(self.power) else "norms"

    def implies(self, other: Bound) -> bool:
        """Return whether every update within this bound is also within the other bound."""
        if self.limit > other.limit:
            return False
        if self.power == math.inf:  # the root mean square is no larger than the largest entry
            return other.power == math.inf or math.isnan(other.power)
        if math.isnan(self.power) and math.isnan(other.power):
            return self.scope == other.scope
        # False if one of the two powers is NaN
        return other.power >= self.power and _is_part(other.scope, self.scope)


def idle_clips(
    links: Sequence[Link], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Link, float, Bound]]:
    """Yield each clipping rule that never clips, the limit, and the tighter bound before the rule.

    Args:
        links: The links that all parameters pass, in order.
        groups: The parameter groups.
    """
    before: list[Bound | None] = [None] * len(groups)
    for link in links:
        here = [_bound(link, group) for group in groups]
        idle = [
            (y.limit, x)
            for x, y in zip(before, here, strict=True)
            if x is not None and y is not None and not y.exact and x.implies(y)
        ]
        if idle and len(idle) == len(groups):
            limit, tighter = idle[0]
            yield link, limit, tighter
        else:
            before = here


def _bound(link: Link, group: Mapping[str, Any]) -> Bound | None:
    """Return the bound of a link's updates with the values of a group, or None if not known."""
    rule = link.transform
    if rule.target != "update":
        return None
    live = link.values(group)
    if isinstance(rule, NormRule):
        return _of_norm_rule(link, rule, live)
    if not isinstance(rule, Bounding) or not _is_still_so(rule, "largest_entry", "update", "step"):
        return None
    entry = rule.largest_entry
    limit = live[entry] if isinstance(entry, str) else entry
    if not _is_host_number(limit):
        return None
    return Bound(link, math.inf, None, float(limit), not isinstance(entry, str))


def _of_norm_rule(link: Link, rule: NormRule, live: dict[str, Any]) -> Bound | None:
    """Return the bound of a norm rule, if a hyperparameter is its limit."""
    name = rule.limit_is if _is_still_so(rule, "limit_is", "limit", "step", "apply") else None
    limit = None if name is None else live[name]
    power = _power(rule.ord)
    if power is None or rule.min_size > 1 or not _is_host_number(limit):
        return None
    scope: Any = rule.scope
    if not (scope is None or isinstance(scope, str)):
        scope = (scope, rule.inverse_dims)
    return Bound(link, power, scope, float(limit), rule.sets_norm)


def _is_still_so(rule: Any, mark: str, *methods: str) -> bool:
    """Return whether a mark of a class is still true for a rule.

    It is true if no subclass of the class with the mark overrides the methods that the mark
    describes.
    """
    marked = _owner(type(rule), mark)
    return all([issubclass(marked, _owner(type(rule), method)) for method in methods])


def _owner(cls: type, name: str) -> type:
    """Return the class that defines an attribute."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _power(order: Any) -> float | None:
    """Return the `power` of a bound for norms of this order, or None if there is none."""
    m = measure(order)
    if m.kind == "max":
        return math.inf
    if m.kind != "power" or m.p < 1 or m.degree != 1:
        return None
    if m.mean:
        return math.nan if m.p == 2 else None
    return m.p


def _is_part(inner: Any, outer: Any) -> bool:
    """Return whether one norm of the outer scope covers every norm of the inner scope."""
    if inner == outer:
        return True
    if outer not in SCOPES:
        return False
    return inner not in SCOPES or SCOPES.index(inner) <= SCOPES.index(outer)


def _is_host_number(x: Any) -> TypeGuard[float]:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
