"""Logs in JSON: an object a line, a list of objects, or the state of a Trainer."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from typing import Any

from torchzero_clip.core.user_warnings import warn

TENSORBOARD = ["Wall time", "Step", "Value"]  # its lists of numbers
DEEPEST = 100  # objects in objects
SHOWN = 80  # letters of a line that a sentence repeats


def of_json(text: str, source: str) -> dict[str, list[str]]:
    """The cells of an object a line, of a list of objects, or of the state of a Trainer."""
    try:
        flat = [dict(flattened(row)) for row in objects(text, source)]
    except (RecursionError, MemoryError):
        raise ValueError(
            f"Trace: {source} must be a list of objects, or one in every line, got brackets in "
            "brackets, too deep to read"
        ) from None
    names = dict.fromkeys(name for row in flat for name in row)
    return {name: [row.get(name, "") for row in flat] for name in names}


def objects(text: str, source: str) -> list[Any]:
    """The objects in a text, of which each has the numbers of a step."""
    try:
        found = json.loads(text)
    except ValueError:
        return by_lines(text.splitlines(), source)
    if isinstance(found, dict):
        found = found.get("log_history", [found])  # a Hugging Face Trainer's trainer_state.json
    if not isinstance(found, list):
        raise ValueError(
            f"Trace: {source} must have a list as its log_history, got {type(found).__name__}"
        )
    # as TensorBoard downloads it
    return [dict(zip(TENSORBOARD, x, strict=False)) if isinstance(x, list) else x for x in found]


def by_lines(lines: list[str], source: str) -> list[Any]:
    """An object a line; the last line may still be on its way."""
    found = []
    for i, line in enumerate(lines, 1):
        try:
            found += [spelt(line)] if line.strip() else []
        except (SyntaxError, TypeError, ValueError):
            if i == len(lines):
                warn(f"Trace: {source} ends within a line, which is left out")
                break
            raise ValueError(
                f"Trace: {source} must have an object in every line, got line {i}: {line[:SHOWN]}"
            ) from None
    return found


def spelt(line: str) -> Any:
    """An object as JSON spells it, or as Python prints it."""
    try:
        return json.loads(line)
    except ValueError:
        if not line.lstrip().startswith("{'"):
            raise
        return ast.literal_eval(line.strip())


def flattened(row: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """The values in an object as text, those in objects within it named "outer/inner"."""
    if prefix.count("/") > DEEPEST:  # whatever this process has as its limit
        raise RecursionError
    for key, value in row.items() if isinstance(row, dict) else ():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", "" if value is None else str(value)
