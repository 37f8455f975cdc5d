"""The slow cases of a day: of a file that takes long a run has a share, each day another one.

`SLOW_SHARE` is the share of each file's cases and `SLOW_DAY` what chooses them; without a share all
run. `scripts/slow.py` sets both.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """What chooses the slow cases of a run."""

    day: str
    share: float

    def __str__(self) -> str:
        return f"SLOW_DAY={self.day} SLOW_SHARE={self.share:g}"

    def of(self, cases: Sequence[str]) -> set[str]:
        """The cases of a file that run: so many of them, in an order that each day has anew. Where
        that is no whole number some days have one more, so that a long one comes now and then."""

        def place(case: str) -> float:
            return int(hashlib.sha256(f"{self.day} {case}".encode()).hexdigest(), 16) / 2**256

        count = self.share * len(cases) + place(f"count of {min(cases, default='')}")
        return set(sorted(cases, key=place)[: math.floor(count + 1e-9)])


def choice() -> Choice | None:
    """What the environment says; None where all cases run."""
    if "SLOW_SHARE" not in os.environ:
        return None
    given, day = os.environ["SLOW_SHARE"], os.environ.get("SLOW_DAY", "")
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not (0 < share <= 1 and day):
        raise ValueError(
            "SLOW_SHARE takes a number above 0 and at most 1, and SLOW_DAY any word beside it, got "
            f"{given!r} and {day!r}: without both all cases run"
        )
    return Choice(day, share)


def chosen(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The tests that run, and the slow ones that another day may choose."""
    chooses, files = choice(), dict[str, list[str]]()
    if chooses is None:
        return list(items), []
    for item in items:
        if item.get_closest_marker("slow"):
            files.setdefault(item.nodeid.partition("::")[0], []).append(item.nodeid)
    slow = {case for cases in files.values() for case in cases}
    kept = {case for cases in files.values() for case in chooses.of(cases)}
    rest = [item for item in items if item.nodeid in slow - kept]
    return [item for item in items if item.nodeid not in slow - kept], rest
