"""The error for a name that a rule reads although the name does not exist."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchzero_clip.core.description import class_with, unannotated
from torchzero_clip.core.link import Link
from torchzero_clip.core.names import UnknownKey, hint

LIBRARIES = frozenset({__name__.partition(".")[0], "torch"})


def explained(
    error: KeyError, link: Link, state: Collection[str], group: Collection[str]
) -> UnknownKey | None:
    """Return an error that explains a KeyError from a rule, or None if the cause is unknown.

    Args:
        error: The error that the rule raised.
        link: The link of the rule.
        state: The names in its `state`.
        group: The names in its `group`.
    """
    key = error.args[0] if error.args else None
    if isinstance(error, UnknownKey) or not isinstance(key, str):
        return None
    if key in state or key in group:
        return None
    if _is_raised_by_user(error):
        advice = _advice(link.transform, key, [*state, *group])
    elif type(link.transform).__module__.partition(".")[0] not in LIBRARIES:
        advice = ": the methods for the initial state must return the state of the base class too"
    else:
        return None
    return UnknownKey(
        f"{link.path}: the key {key!r} is neither in state, which has {sorted(state)}, nor in "
        f"group, which has {sorted(group)}{advice}"
    )


def _is_raised_by_user(error: KeyError) -> bool:
    """Return whether the line that raised the error is outside of this library and torch."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else place.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] not in LIBRARIES


def _advice(rule: Any, key: str, known: Collection[str]) -> str:
    """Return the end of the error message: the code to write instead."""
    if key in type(rule).__dataclass_fields__:
        return f": read self.{key} instead, or annotate the field {key} with Live[...]"
    if why := unannotated(type(rule), key):
        return f": {why}"
    if near := hint(key, known):
        return near
    if class_with(key) != "a link":
        return f": to read {key} of another transform, write reads = ({key!r},) in the class"
    return ". If the rule reads the key from another dict, this dict does not have the key either"
