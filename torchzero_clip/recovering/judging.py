"""Judging: decide whether training diverges, from losses and from steps that a guard skipped.

The decision needs only numbers. So a recorded run can be judged in the same way as a run that is
training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from torchzero_clip.core.plurals import counted

TIE = 1e-12
"""A standard deviation below this multiple of the mean is caused by rounding alone."""


class Look(NamedTuple):
    """The facts about one step that `Recover` checks.

    Attributes:
        loss: The loss of the step, averaged over the ranks that reported one. 0 if no rank did.
        broken: Whether the loss of any rank is NaN or infinite.
        skipped: Whether a guard skipped the step.
        told: Whether any rank reported a loss.
        moved: Whether the optimizer took a step. It takes no step if a GradScaler skips the step,
            or while gradients are accumulated over several batches.
    """

    loss: float
    broken: bool = False
    skipped: bool = False
    told: bool = True
    moved: bool = True


def limit_of(losses: Sequence[float], sigmas: float, window: int) -> float:
    """Return the loss above which a step is bad.

    Args:
        losses: The last good losses, at most `window`.
        sigmas: The limit is this number of standard deviations above the mean of `losses`. As long
            as there are fewer than `window / 2` losses, the limit is infinite.
        window: The largest number of losses that `Recover` stores.
    """
    if 2 * len(losses) < window or len(losses) < 2:
        return math.inf
    mean = statistics.fmean(losses)
    std = statistics.stdev(losses)
    return mean + sigmas * std if std > TIE * abs(mean) else math.inf


def judged(looks: Sequence[Look], limit: float) -> tuple[list[bool], str]:
    """Return which of the last steps are bad, and the reason for a rollback.

    A step is bad if it was skipped, or if its loss is above the limit, NaN or infinite. A rollback
    is needed if more than half of the steps are bad, because guards handle single bad steps. A
    rollback is also needed if the loss was NaN or infinite in a step that changed the weights.
    If no rollback is needed, the reason is an empty string.
    """
    is_high = [
        look.told and not (look.broken or look.skipped) and look.loss > limit for look in looks
    ]
    is_bad = [
        look.broken or look.skipped or high for look, high in zip(looks, is_high, strict=True)
    ]
    if any([look.broken and look.moved and not look.skipped for look in looks]):
        return is_bad, "the loss was NaN or infinite in a step that no guard skipped"
    if 2 * sum(is_bad) <= len(looks):
        return is_bad, ""
    skipped = sum([look.skipped for look in looks])
    broken = sum([look.broken and not look.skipped for look in looks])
    reasons = []
    if skipped:
        reasons.append(f"{skipped} {'was' if skipped == 1 else 'were'} skipped by a guard")
    if broken:
        reasons.append(f"{broken} had a NaN or infinite loss")
    if any(is_high):
        reasons.append(f"{sum(is_high)} had a loss above {limit:.4g}")
    return is_bad, f"of the last {counted(len(looks), 'step')}, {' and '.join(reasons)}"
