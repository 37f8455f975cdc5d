"""Planning: find the tails of a chain when an optimizer is built.

A tail is the last links of a chain, if an engine can run all of them in one pass over memory. A
scaling is a link that computes u ← a · u + b · w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.plan import ChainPlan, Tail
from torchzero_clip.core.traits import only_routes
from torchzero_clip.core.transform import Transform


def planned(links: Sequence[Link], live: Mapping[str, Any]) -> ChainPlan:
    """Return the plan of a chain.

    Args:
        links: The links of the chain.
        live: The default live hyperparameters by their keys.
    """
    tails: dict[Link, Tail] = {}
    _add_tails(links, (), live, tails)
    factors = [tail.factor for tail in tails.values() if tail.factor is not None]
    return ChainPlan(tails, frozenset(factors))


def _add_tails(
    links: Sequence[Link],
    after: tuple[Link, ...],
    live: Mapping[str, Any],
    tails: dict[Link, Tail],
) -> tuple[Link, ...] | None:
    """Add the tails that begin at one of these links.

    Args:
        links: Consecutive links.
        after: The scalings from the last of these links to the end of the chain.
        live: The default live hyperparameters by their keys.
        tails: The dictionary to which the tails are added.

    Returns:
        The scalings from the first of the links to the end of the chain. None if one of the links
        does more than scale.
    """
    for i in range(len(links) - 1, -1, -1):
        link = links[i]
        factor = links[i - 1] if i and _only_divides(links[i - 1]) else None
        if _scales(link, live):
            after = (link, *after)
            tails[link] = Tail(None, after, _of_update(factor))
        elif _has_kernel(link, live):
            tails[link] = Tail(link, after, factor)
            return None
        elif not only_routes(link.transform):
            return None
        elif link.transform.one_way:
            inner = _add_tails(link.children, after, live, tails)
            if inner is None or not link.transform.takes_all:
                return None
            after = inner
        else:
            for child in link.children:
                _add_tails([child], after, live, tails)
            return None
    return after


def _of_update(factor: Link | None) -> Link | None:
    """Return the norm rule if the rule divides the update, or None if it divides gradients."""
    if factor is None or factor.transform.target != "update":
        return None
    return factor


def _calls_update_alone(link: Link) -> bool:
    """Return whether the step of a link only calls its `update` for all parameters."""
    tfm = link.transform
    return (
        isinstance(tfm, Transform)
        and type(tfm).step is Transform.step
        and type(tfm).rule is Transform.rule
        and tfm.target == "update"
        and tfm.complex != "refuse"
        and not getattr(tfm, "clips", False)
        and not (tfm.drops or link.children or link.numbered)
    )


def _scales(link: Link, live: Mapping[str, Any]) -> bool:
    """Return whether a link computes u ← a · u + b · w."""
    return _calls_update_alone(link) and link.transform.affine(link.values(live)) is not None


def _has_kernel(link: Link, live: Mapping[str, Any]) -> bool:
    """Return whether torch has a fused optimizer for a link."""
    if not _calls_update_alone(link) or type(link.transform).fused is Transform.fused:
        return False
    kernel = link.transform.fused(link.values(live))
    return kernel is not None and kernel.function is not None


def _only_divides(link: Link) -> bool:
    """Return whether a link only divides the update, by one number for each group."""
    tfm = link.transform
    return (
        isinstance(tfm, NormRule)
        and type(tfm).step is NormRule.step
        and type(tfm).apply is NormRule.apply
        and tfm.scope in ("group", "global")
    )
