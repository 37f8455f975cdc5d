"""Requests that the page sends. A request with a wrong value raises an error."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from torchzero_clip.study.simulate_command import shortened

LARGEST_INTEGER = 2**53
"""The largest integer up to which JavaScript represents every integer."""
TEXT_LENGTH = 10_000
"""The largest number of characters in a text."""
PATH_LENGTH = 8
"""The largest number of elements in a path."""


class Question:
    """The JSON object of a request. Each method checks the type of one field and returns it.

    Args:
        body: The body of the request.
    """

    def __init__(self, body: bytes) -> None:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError, MemoryError):  # the last two: too deep nesting
            raise ValueError("lab: the body of a request must be a JSON object") from None
        if not isinstance(fields, dict):
            raise ValueError(
                f"lab: the body of a request must be a JSON object, got {shown(fields)}"
            )
        self._fields: dict[str, Any] = fields

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def text(self, field: str, default: str | None = None) -> str:
        """Return a text of limited length."""
        value = self._fields.get(field, default)
        if not isinstance(value, str) or len(value) > TEXT_LENGTH:
            raise self._wrong(field, f"a string of at most {TEXT_LENGTH} characters")
        return value

    def whole(self, field: str, default: int | None = None) -> int:
        """Return an integer that is not negative."""
        value = self._fields.get(field, default)
        if not is_whole(value):
            raise self._wrong(field, f"an integer from 0 to {LARGEST_INTEGER}")
        return value

    def wholes(self, field: str) -> list[int]:
        """Return a list of integers that are not negative. The default is an empty list."""
        value = self._fields.get(field, [])
        if not isinstance(value, list) or not all(map(is_whole, value)):
            raise self._wrong(field, f"a list of integers from 0 to {LARGEST_INTEGER}")
        return value

    def path(self, field: str) -> list[str | int]:
        """Return a `rules.Path` as a list. The default is an empty list."""
        value = self._fields.get(field, [])
        is_short_list = isinstance(value, list) and len(value) <= PATH_LENGTH
        if not is_short_list or not all(isinstance(x, str) or is_whole(x) for x in value):
            raise self._wrong(field, f"a list of at most {PATH_LENGTH} names and integers")
        return list(value)

    def _wrong(self, field: str, wanted: str) -> ValueError:
        got = shown(self._fields[field]) if field in self._fields else "nothing"
        return ValueError(f"lab: {field!r} must be {wanted}, got {got}")


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to `LARGEST_INTEGER`."""
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def shown(value: Any) -> str:
    """Return the beginning of a value, or the kind of a list or dict, for an error message."""
    for kind, name in ((dict, "an object"), (list, "a list")):
        if isinstance(value, kind):
            return f"{name} of length {len(value)}"
    return shortened(json.dumps(value))
