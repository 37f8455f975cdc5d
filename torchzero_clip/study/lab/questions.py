"""Questions of the page: what they may say, and a sentence for what they may not."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

MOST = 2**53  # up to here a page counts one by one
LETTERS, SHOWN = 10_000, 80  # of a text; of one that a sentence repeats
DEPTH = 8  # of a path


class Question:
    """The object of a request, whose fields are asked for by kind.

    Args:
        body: What the request brought.
    """

    def __init__(self, body: bytes) -> None:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError, MemoryError):  # the last two: brackets in brackets
            raise ValueError("lab: a question is an object in JSON, got something else") from None
        if not isinstance(asked, dict):
            raise ValueError(f"lab: a question is an object in JSON, got {told(asked)}")
        self._asked: dict[str, Any] = asked

    def __contains__(self, field: str) -> bool:
        return field in self._asked

    def text(self, field: str, default: str | None = None) -> str:
        """A text that is not too long."""
        given = self._asked.get(field, default)
        if not isinstance(given, str) or len(given) > LETTERS:
            raise self._wrong(field, f"a text of at most {LETTERS} letters")
        return given

    def whole(self, field: str, default: int | None = None) -> int:
        """A whole number from 0 on."""
        given = self._asked.get(field, default)
        if not is_whole(given):
            raise self._wrong(field, f"a whole number from 0 to {MOST}")
        return given

    def wholes(self, field: str) -> list[int]:
        """Whole numbers from 0 on; none where nothing was said."""
        given = self._asked.get(field, [])
        if not isinstance(given, list) or not all(map(is_whole, given)):
            raise self._wrong(field, f"a list of whole numbers from 0 to {MOST}")
        return given

    def path(self, field: str) -> list[str | int]:
        """Where a number is in a rule; nowhere where nothing was said."""
        given = self._asked.get(field, [])
        short = isinstance(given, list) and len(given) <= DEPTH
        if not short or not all(isinstance(one, str) or is_whole(one) for one in given):
            raise self._wrong(field, f"a list of at most {DEPTH} names and whole numbers")
        return list(given)

    def _wrong(self, field: str, wanted: str) -> ValueError:
        got = told(self._asked[field]) if field in self._asked else "nothing"
        return ValueError(f"lab: {field!r} must be {wanted}, got {got}")


def is_whole(given: Any) -> TypeGuard[int]:
    """Whether it is a whole number that a page can count to."""
    return type(given) is int and 0 <= given <= MOST


def told(given: Any) -> str:
    """What was given: its kind where it may be deep, and no more than its beginning."""
    for kind, name in ((dict, "an object"), (list, "a list")):
        if isinstance(given, kind):
            return f"{name} of length {len(given)}"
    text = json.dumps(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
