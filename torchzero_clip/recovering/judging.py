"""The decision whether training diverges, from the losses of steps and the steps a guard skipped.

It needs only numbers. So a recorded run can be judged in the same way as a run that is training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

TIE = 1e-12
"""A standard deviation below this multiple of the mean is caused by rounding alone."""


class Look(NamedTuple):
    """What is known about one step when `Recover` checks it.

    Attributes:
        loss: The loss of the step, averaged over the ranks that reported a loss. 0 if none did.
        broken: Whether the loss of any rank is NaN or infinite.
        skipped: Whether a guard skipped the step.
        told: Whether any rank reported a loss.
        moved: Whether the optimizer took a step. It did not if a GradScaler skipped the step, or if
            gradients are accumulated over several batches.
    """

    loss: float
    broken: bool = False
    skipped: bool = False
    told: bool = True
    moved: bool = True


def limit_of(losses: Sequence[float], sigmas: float, window: int) -> float:
    """Return the loss above which a step is bad.

    Args:
        losses: The last good losses, at most `window` of them.
        sigmas: The limit is this number of standard deviations above the mean of `losses`. It is
            infinite while there are fewer than `window / 2` losses.
        window: The most losses that `Recover` remembers.
    """
    if 2 * len(losses) < window or len(losses) < 2:
        return math.inf
    mean = statistics.fmean(losses)
    std = statistics.stdev(losses)
    return mean + sigmas * std if std > TIE * abs(mean) else math.inf


def judged(rows: Sequence[Look], limit: float) -> tuple[list[bool], str]:
    """Return which of the last steps are bad, and the reason for a rollback.

    A step is bad if it was skipped, or if its loss is above the limit, NaN or infinite. A rollback
    is needed if more than half of the steps are bad, because guards handle single bad steps. A
    rollback is also needed if the loss was NaN or infinite in a step that changed the weights.
    If no rollback is needed, the reason is an empty string.
    """
    is_high = [row.told and not (row.broken or row.skipped) and row.loss > limit for row in rows]
    is_bad = [row.broken or row.skipped or high for row, high in zip(rows, is_high, strict=True)]
    if any([row.broken and row.moved and not row.skipped for row in rows]):
        return is_bad, "a loss was no finite number in a step that no guard skipped"
    if 2 * sum(is_bad) <= len(rows):
        return is_bad, ""
    skipped = sum([row.skipped for row in rows])
    broken = sum([row.broken and not row.skipped for row in rows])
    reasons = []
    if skipped:
        reasons.append(f"{skipped} were skipped")
    if broken:
        reasons.append(f"{broken} had a loss that is not finite")
    if any(is_high):
        reasons.append(f"{sum(is_high)} had a loss above {limit:.4g}")
    return is_bad, f"of the last {len(rows)} steps {' and '.join(reasons)}"
