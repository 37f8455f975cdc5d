"""Rows of results files: dataclasses of numbers and words, a line of CSV each."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

KINDS = {"float": float, "int": int, "str": str}


def digits(value: float) -> float:
    """Four digits: what the files hold is what is computed with."""
    return float(f"{value:.4g}")


def read(file: Path, kind: type[Any]) -> list[Any]:
    """The rows of a file; none where there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [
            kind(**{f.name: KINDS[str(f.type)](line[f.name]) for f in fields(kind)})
            for line in csv.DictReader(lines)
        ]


def write(file: Path, kind: type[Any], rows: Iterable[Any], more: bool = False) -> None:
    """Write rows as they come, behind those of the file where there are `more`."""
    begun = more and file.exists() and file.stat().st_size > 0  # one that was stopped may be empty
    with file.open("a" if more else "w", newline="", encoding="utf-8") as out:
        lines = csv.DictWriter(out, [f.name for f in fields(kind)], lineterminator="\n")
        if not begun:
            lines.writeheader()
        for row in rows:
            lines.writerow(asdict(row))
            out.flush()
