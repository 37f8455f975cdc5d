"""Idle clips: clipping rules that never clip, since what enters them is bounded already."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.norms import measure
from torchzero_clip.core.traits import Bounding

SCOPES = (None, "layer", "group", "global")
"""What a norm covers, from a tensor to the model. Slices of a tensor come before all of these."""


class Bound(NamedTuple):
    """A bound of the update: no norm of this kind, over this scope, is larger.

    Attributes:
        link: The link that leaves such updates.
        power: The p of a p-norm, infinity for the largest entry, NaN for the root mean square.
        scope: What the norm covers, or the dims of slices.
        limit: The bound.
        exact: Whether the link sets norms, so that a looser limit after it cannot be meant.
    """

    link: Link
    power: float
    scope: Any
    limit: float
    exact: bool

    def implies(self, other: Bound) -> bool:
        """Whether updates within this bound are within the other."""
        if self.limit > other.limit:
            return False
        if self.power == math.inf:  # the root mean square is no larger than the largest entry
            return other.power == math.inf or math.isnan(other.power)
        if math.isnan(self.power) or math.isnan(other.power):
            same = math.isnan(self.power) and math.isnan(other.power)
            return same and self.scope == other.scope
        return other.power >= self.power and _is_part(other.scope, self.scope)


def idle_clips(
    links: Sequence[Link], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each clipping rule that never clips, and what to do about it.

    Args:
        links: Links that all parameters pass one after another.
        groups: The parameter groups.
    """
    before: list[Bound | None] = [None] * len(groups)
    for link in links:
        here = [_bound(link, group) for group in groups]
        pairs = [
            (x, y) for x, y in zip(before, here, strict=True) if x is not None and y is not None
        ]
        idle = bool(pairs) and len(pairs) == len(groups)
        if idle and all([not y.exact and x.implies(y) for x, y in pairs]):
            first, second = pairs[0]
            said = (
                f"{link.path} at {second.limit:g} never clips: {first.link.path} before it leaves "
                f"{_norm(first)} of at most {first.limit:g}"
            )
            yield said, f"leave one of the two out, or put {link.path} first" if first.exact else ""
            continue  # the tighter bound stays
        before = here


def _norm(bound: Bound) -> str:
    if bound.power == math.inf:
        return "entries"
    return "root mean squares" if math.isnan(bound.power) else "norms"


def _bound(link: Link, group: Mapping[str, Any]) -> Bound | None:
    """Return the bound that a link leaves with the live values of a group, if one is known."""
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
    """Return the bound of a rule whose limit is a live value, whatever the norms are."""
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
    """Whether no class between a rule's own and the one with the mark overrides these methods."""
    said = _owner(type(rule), mark)
    return all([issubclass(said, _owner(type(rule), method)) for method in methods])


def _owner(cls: type, name: str) -> type:
    """Return the class that an attribute is from."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _power(order: Any) -> float | None:
    m = measure(order)
    if m.kind == "max":
        return math.inf
    if m.kind != "power" or m.p < 1 or m.degree != 1:
        return None
    if m.mean:
        return math.nan if m.p == 2 else None
    return m.p


def _is_part(inner: Any, outer: Any) -> bool:
    """Whether all that a norm of one scope covers is covered by one norm of the other."""
    if inner == outer:
        return True
    if outer not in SCOPES:
        return False
    return inner not in SCOPES or SCOPES.index(inner) <= SCOPES.index(outer)


def _is_host_number(x: Any) -> TypeGuard[float]:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
