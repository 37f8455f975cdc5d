"""Lessons: the steps in which the factors of the official Kron learn, ever more seldom."""

from __future__ import annotations

import functools
import math

FLAT, FALL, LEAST = 500, 1e-3, 0.03  # until when their share is 1, how fast it falls, how far
LAST = math.ceil(1 / LEAST)
RHYTHM = f"in each of the first {FLAT + 1} steps, then ever more seldom, at last every {LAST}"


def is_due(step: int) -> bool:
    """Whether a step, counted from 0, has a lesson."""
    early, last = _early()
    return step in early if step <= last else (step - last) % LAST == 0


@functools.cache
def _early() -> tuple[frozenset[int], int]:
    """The steps with a lesson until all that follow are as far apart, and the last of them."""
    due: set[int] = set()
    since = step = 0
    while True:
        since += 1
        share = max(min(math.exp(FALL * (FLAT - step)), 1.0), LEAST)
        if since >= 1 / share:
            due.add(step)
            since = 0
            if share == LEAST:
                return frozenset(due), step
        step += 1
