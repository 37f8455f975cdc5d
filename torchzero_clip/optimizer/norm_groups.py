"""Norm groups: gradients that norm rules skip, and gradients that have a separate norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchzero_clip.core.cohort import TAG, label
from torchzero_clip.core.description import ON_NORMS


def settings_of(groups: Any) -> tuple[Any, ...]:
    """Return all settings for norm rules in groups and in the parameters of groups."""
    keys = [group.get(key) for group in groups for key in ON_NORMS]
    return (*keys, *[getattr(p, TAG, None) for group in groups for p in group["params"]])


def check(group: Mapping[str, Any]) -> None:
    """Raise an error unless rules can read the norm settings of a group."""
    clip = group.get("clip", True)
    named = group.get("norm_group")
    if not isinstance(clip, bool):
        raise TypeError(f"the key 'clip' of a parameter group must be True or False, got {clip!r}")
    if named is not None:
        _check_name("the key 'norm_group' of a parameter group", named)


def check_tags(g: int, group: Mapping[str, Any], process_group: Any) -> None:
    """Raise an error unless the tags of a group's parameters are names that rules can use."""
    for place, p in enumerate(group["params"]):
        tag = getattr(p, TAG, None)
        if not tag:
            continue
        _check_name(f"{label(g, group, place)}: its attribute {TAG}", tag)
        if process_group is not None:
            raise ValueError(
                f"the attribute {TAG} of parameters is not supported with process_group: put these "
                "parameters into a parameter group with norm_group=, and use the same groups on "
                "every rank"
            )


def _check_name(what: str, named: Any) -> None:
    """Raise an error unless a value may be the name of a norm group. State keys contain it."""
    if not isinstance(named, str) or not named or set("/@") & set(named):
        raise TypeError(f"{what} must be a string without / and @, such as 'head', got {named!r}")


def with_own_settings(theirs: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a checkpoint's group with the norm settings and names of our group.

    Rules such as Partition decide by the names, so the names of the checkpoint must not replace
    the names that the optimizer was constructed with.
    """
    rest = {key: value for key, value in theirs.items() if key not in ON_NORMS}
    return {**rest, **{key: here[key] for key in (*ON_NORMS, "param_names") if key in here}}


def sentences(groups: Any) -> Iterator[str]:
    """Yield a sentence for each group without norm rules, and for each group with its own norm."""
    for g, group in enumerate(groups):
        tags = sorted({tag for p in group["params"] if (tag := getattr(p, TAG, None))})
        if not group.get("clip", True):
            yield f"group {g} has clip=False, so it is neither clipped nor part of any norm"
        elif group.get("norm_group") or tags:
            names = ", ".join(map(repr, tags or [group["norm_group"]]))
            has = f"some parameters of group {g} have" if tags else f"group {g} has"
            yield f"{has} a separate norm, {names}, which replaces the global norm"
