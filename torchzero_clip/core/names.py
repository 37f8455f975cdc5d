"""Names: find the entry for a parameter by name or pattern, and give hints and errors for names.

A pattern is a glob that must match the whole name, such as "*.qkv". Bars separate alternatives.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torchzero_clip.core import torch_private

NUMBER = re.compile(r"\b\d+\b")


class UnknownKey(KeyError):
    """A KeyError that shows its message without quotes around it."""

    def __str__(self) -> str:
        return str(self.args[0])


def by_name(choices: Mapping[str, Any], name: str) -> str | None:
    """Return the key for a parameter: its name, or the first pattern that matches its name."""
    return name if name in choices else _first(tuple(choices), name)


def alternatives(pattern: str) -> list[str]:
    """Return the globs of a pattern, which bars separate."""
    return [part.strip() for part in pattern.split("|")]


def without_match(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first glob of some patterns that matches no name, or None."""
    known = list(names)
    for pattern in patterns:
        for part in [] if pattern in known else alternatives(pattern):
            if not any([fnmatchcase(name, part) for name in known]):
                return part
    return None


def check_patterns(rule: Any, field: str) -> None:
    """Raise an error unless the keys of a mapping are patterns of names."""
    mapping = getattr(rule, field)
    for key in mapping:
        if not isinstance(key, str) or not all(alternatives(key)):
            raise ValueError(
                f"{type(rule).__name__}: the keys of {field} must be names or patterns, such as "
                f"'*.qkv' or '*.q | *.k', got {mapping!r} with the key {key!r}"
            )


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the most similar known name."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def without_numbers(name: str) -> str:
    """Return the name of a parameter with `*` in place of each number between its dots."""
    return NUMBER.sub("*", name)


@torch_private.constant  # `torch.compile` cannot trace fnmatch
def _first(patterns: tuple[str, ...], name: str) -> str | None:
    return _first_match(patterns, name)


@functools.lru_cache(maxsize=2**16)
def _first_match(patterns: tuple[str, ...], name: str) -> str | None:
    for pattern in patterns:
        if any([fnmatchcase(name, part) for part in alternatives(pattern)]):
            return pattern
    return None
