"""Names: choices by the name of a parameter or a pattern in it, and names that are misspelt."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any


def by_name(choices: Mapping[str, Any], name: str) -> str | None:
    """The key of a choice: the name itself, or the first pattern that is found in it."""
    return name if name in choices else _first(tuple(choices), name)


def check_patterns(rule: Any, field: str) -> None:
    """Raise a sentence unless the keys of a mapping are regular expressions."""
    given = getattr(rule, field)
    for key in given:
        try:
            re.compile(key)
        except (TypeError, re.error) as error:
            raise ValueError(
                f"{type(rule).__name__}: the keys of {field} must be names or regular expressions, "
                f"got {given!r}; {key!r} is neither: {error}"
            ) from None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is unknown: the one that may have been meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


@functools.lru_cache(maxsize=2**16)
def _first(patterns: tuple[str, ...], name: str) -> str | None:
    return next((pattern for pattern in patterns if re.search(pattern, name)), None)
