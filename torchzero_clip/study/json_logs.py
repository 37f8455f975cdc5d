"""Logs in JSON: one object in each line, a list of objects, or a `trainer_state.json`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from typing import Any

from torchzero_clip.core.user_warnings import warn

TENSORBOARD = ["Wall time", "Step", "Value"]
"""The columns of a TensorBoard export. In the JSON form, rows are lists without these names."""
DEPTH_LIMIT = 100
"""The largest number of levels of objects inside objects."""
SHOWN_LENGTH = 80
"""The largest number of characters of a line that an error message shows."""


def of_json(text: str, source: str) -> dict[str, list[str]]:
    """Return the cells of a log in JSON, by column.

    Args:
        text: One object in each line, a list of objects, or the `trainer_state.json` of a Hugging
            Face Trainer.
        source: The name of the file, for error messages.
    """
    try:
        rows = [dict(flattened(row)) for row in objects(text, source)]
    except (RecursionError, MemoryError):
        raise ValueError(
            f"Trace: {source} cannot be read, because its brackets are nested too deeply: "
            "write a JSON list of objects, or one JSON object per line"
        ) from None
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, "") for row in rows] for name in names}


def objects(text: str, source: str) -> list[Any]:
    """Return the objects in a JSON text. Each object has the numbers of one step."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return by_lines(text.splitlines(), source)
    if isinstance(parsed, dict):
        parsed = parsed.get("log_history", [parsed])  # trainer_state.json of a Hugging Face Trainer
    if not isinstance(parsed, list):
        raise ValueError(
            f"Trace: log_history in {source} must be a list, got {type(parsed).__name__}"
        )
    return [dict(zip(TENSORBOARD, x, strict=False)) if isinstance(x, list) else x for x in parsed]


def by_lines(lines: list[str], source: str) -> list[Any]:
    """Return one object for each line that is not empty.

    If the last line is incomplete, it is skipped with a warning.
    """
    parsed = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            parsed.append(parsed_line(line))
        except (SyntaxError, TypeError, ValueError):
            if i == len(lines):
                warn(f"Trace: the last line of {source} is incomplete, so Trace skips this line")
                break
            raise ValueError(
                f"Trace: every line of {source} must be a JSON object, got line {i}: "
                f"{line[:SHOWN_LENGTH]}"
            ) from None
    return parsed


def parsed_line(line: str) -> Any:
    """Return the object in a line. The line is JSON, or a dict that Python has printed."""
    try:
        return json.loads(line)
    except ValueError:
        if not line.lstrip().startswith("{'"):
            raise
        return ast.literal_eval(line.strip())


def flattened(row: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield the name and the text of each value in an object.

    A value inside an inner object has a name such as "outer/inner".
    """
    if prefix.count("/") > DEPTH_LIMIT:  # the same limit in every process
        raise RecursionError
    for key, value in row.items() if isinstance(row, dict) else ():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", "" if value is None else str(value)
