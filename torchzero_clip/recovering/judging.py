"""Judging: whether a run is in trouble, from the losses of its steps and the flags of its guards.

It knows numbers alone, so that a recorded run can be judged as one that goes on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

TIE = 1e-12  # of the mean: a spread that rounding alone makes


class Look(NamedTuple):
    """A step as it is judged.

    Attributes:
        loss: Its loss, the mean over all ranks; 0 where none was told.
        broken: Whether the loss is no finite number.
        skipped: Whether a guard skipped the step.
    """

    loss: float
    broken: bool = False
    skipped: bool = False


def limit_of(losses: Sequence[float], sigmas: float, window: int) -> float:
    """The loss from which on a step is bad: so many standard deviations above the mean of the last
    good ones, once there are half of those that are remembered.
    """
    if 2 * len(losses) < window or len(losses) < 2:
        return math.inf
    mean, std = statistics.fmean(losses), statistics.stdev(losses)
    return mean + sigmas * std if std > TIE * abs(mean) else math.inf


def judged(rows: Sequence[Look], limit: float) -> tuple[list[bool], str]:
    """Which of the last steps are bad, and why a run of them must go back, or nothing.

    A step is bad where it was skipped, or its loss is above the limit or no number. One bad step
    is what a guard is for. More than half of them are trouble, and so is a loss that is no number
    in a step that happened.
    """
    high = [row.loss > limit and not (row.broken or row.skipped) for row in rows]
    bad = [row.broken or row.skipped or x for row, x in zip(rows, high, strict=True)]
    if any([row.broken and not row.skipped for row in rows]):
        return bad, "a loss was no finite number in a step that no guard skipped"
    if 2 * sum(bad) <= len(rows):
        return bad, ""
    skipped = sum([row.skipped for row in rows])
    parts = [f"{skipped} were skipped"] * (skipped > 0)
    parts += [f"{sum(high)} had a loss above {limit:.4g}"] * any(high)
    return bad, f"of the last {len(rows)} steps {' and '.join(parts)}"
