"""Judging: whether a run is failing, from the losses of its steps and the flags of its guards.

It knows numbers alone, so that a recorded run can be judged like one that is training.
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
        loss: Its loss, the mean over the ranks that reported one; 0 if none did.
        broken: Whether the loss of a rank is not a finite number.
        skipped: Whether a guard skipped the step.
        told: Whether a rank reported a loss.
        moved: Whether the optimizer took a step. It did not if a GradScaler skipped it, or if
            gradients are accumulated over several batches.
    """

    loss: float
    broken: bool = False
    skipped: bool = False
    told: bool = True
    moved: bool = True


def limit_of(losses: Sequence[float], sigmas: float, window: int) -> float:
    """The loss from which on a step is bad: so many standard deviations above the mean of the last
    good ones, once there are half of those that are remembered.
    """
    if 2 * len(losses) < window or len(losses) < 2:
        return math.inf
    mean, std = statistics.fmean(losses), statistics.stdev(losses)
    return mean + sigmas * std if std > TIE * abs(mean) else math.inf


def judged(rows: Sequence[Look], limit: float) -> tuple[list[bool], str]:
    """Return which of the last steps are bad, and why the run must go back, or an empty string.

    A step is bad if it was skipped, or if its loss is above the limit or not finite. The run goes
    back if more than half of the steps are bad, because single ones are what guards are for. It
    also goes back if the loss was not finite in a step that moved the weights.
    """
    high = [row.told and not (row.broken or row.skipped) and row.loss > limit for row in rows]
    bad = [row.broken or row.skipped or x for row, x in zip(rows, high, strict=True)]
    if any([row.broken and row.moved and not row.skipped for row in rows]):
        return bad, "a loss was no finite number in a step that no guard skipped"
    if 2 * sum(bad) <= len(rows):
        return bad, ""
    skipped = sum([row.skipped for row in rows])
    broken = sum([row.broken and not row.skipped for row in rows])
    parts = []
    if skipped:
        parts.append(f"{skipped} were skipped")
    if broken:
        parts.append(f"{broken} had a loss that is not finite")
    if any(high):
        parts.append(f"{sum(high)} had a loss above {limit:.4g}")
    return bad, f"of the last {len(rows)} steps {' and '.join(parts)}"
