"""Norm groups: which gradients rules about norms leave out, and which share a norm of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchzero_clip.core.cohort import TAG
from torchzero_clip.core.description import ON_NORMS


def check(group: Mapping[str, Any]) -> None:
    """Raise a sentence unless a group says it as rules read it."""
    clip, named = group.get("clip", True), group.get("norm_group")
    if not isinstance(clip, bool):
        raise TypeError(
            f"the group key 'clip' says whether norm rules look at the group, True or False, got "
            f"{clip!r}"
        )
    if named is not None and (not isinstance(named, str) or not named or set("/@") & set(named)):
        raise TypeError(
            "the group key 'norm_group' is the name of those with which the group shares one norm, "
            f"as 'head', without / and @, got {named!r}"
        )


def check_stages(groups: Any, process_group: Any) -> None:
    """Raise a sentence where stages could not know of each other's norms."""
    tagged = [p for group in groups for p in group["params"] if getattr(p, TAG, None)]
    if process_group is not None and tagged:
        raise ValueError(
            f"{TAG} of a parameter says nothing to other stages: with process_group= give such "
            "parameters a group with norm_group=, and every stage the same groups"
        )


def kept(theirs: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """A group of a checkpoint with what the program says of it here."""
    rest = {key: value for key, value in theirs.items() if key not in ON_NORMS}
    return {**rest, **{key: here[key] for key in ON_NORMS if key in here}}


def sentences(groups: Any) -> Iterator[str]:
    """Whose norms are others than one would think."""
    for g, group in enumerate(groups):
        tags = sorted({tag for p in group["params"] if (tag := getattr(p, TAG, None))})
        if not group.get("clip", True):
            yield f"norm rules leave group {g} out, and do not count it: it has clip=False"
        elif group.get("norm_group") or tags:
            names = ", ".join(map(repr, tags or [group["norm_group"]]))
            has = f"some of group {g} have" if tags else f"group {g} has"
            yield f"{has} a norm apart, {names}, where a rule takes one of all"
