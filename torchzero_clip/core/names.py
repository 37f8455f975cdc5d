"""Names: find the entry for a parameter by name or pattern, and give hints for unknown names."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

NUMBER = re.compile(r"\b\d+\b")


def by_name(choices: Mapping[str, Any], name: str) -> str | None:
    """Return the key for a parameter: its name, or the first pattern that occurs in the name."""
    return name if name in choices else _first(tuple(choices), name)


def check_patterns(rule: Any, field: str) -> None:
    """Raise ValueError unless the keys of a mapping are regular expressions."""
    mapping = getattr(rule, field)
    for key in mapping:
        try:
            re.compile(key)
        except (TypeError, re.error) as error:
            raise ValueError(
                f"{type(rule).__name__}: the keys of {field} must be names or regular expressions, "
                f"got {mapping!r}; {key!r} is neither: {error}"
            ) from None


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the most similar known name."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def without_numbers(name: str) -> str:
    """Return the name of a parameter with `*` in place of each number between its dots."""
    return NUMBER.sub("*", name)


@functools.lru_cache(maxsize=2**16)
def _first(patterns: tuple[str, ...], name: str) -> str | None:
    return next((pattern for pattern in patterns if re.search(pattern, name)), None)
