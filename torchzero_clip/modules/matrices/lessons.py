"""The official schedule of Kron: the factors learn in every step at first, and later less often."""

from __future__ import annotations

import functools
import math

FLAT_STEPS = 500  # up to this step the factors learn in every step
DECAY = 1e-3  # after it, the share of steps with a lesson falls by the factor exp(-DECAY) per step
SMALLEST_SHARE = 0.03
LAST_DISTANCE = math.ceil(1 / SMALLEST_SHARE)
RHYTHM = (
    f"in each of the first {FLAT_STEPS + 1} steps, then less and less often, and finally every "
    f"{LAST_DISTANCE} steps"
)


def is_due(step: int) -> bool:
    """Return whether the factors learn in a step. The first step is number 0."""
    early, last = _early()
    return step in early if step <= last else (step - last) % LAST_DISTANCE == 0


@functools.cache
def _early() -> tuple[frozenset[int], int]:
    """Return the learning steps before the interval is constant, and the last of these steps."""
    due: set[int] = set()
    since = 0
    step = 0
    while True:
        since += 1
        share = max(min(math.exp(DECAY * (FLAT_STEPS - step)), 1.0), SMALLEST_SHARE)
        if since >= 1 / share:
            due.add(step)
            since = 0
            if share == SMALLEST_SHARE:
                return frozenset(due), step
        step += 1
