"""The rule that skips a step if a monitored value, such as the loss, spikes."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from torchzero_clip.spec.plain_numbers import Real, finite


class SpikeState(NamedTuple):
    """The last values that were counted, and the number of consecutive skipped steps."""

    values: tuple[Real, ...] = ()
    row: int = 0


def skip_spike(
    x: Real,
    state: SpikeState,
    sigmas: Real = 6,
    window: int = 128,
    least: int = 64,
    patience: int = 20,
    keep_skipped: bool = False,
) -> tuple[bool, SpikeState]:
    """Return whether the step happens. The step is skipped if x - mean > sigmas · std.

    There is no limit before `least` values are counted, or if their unbiased std is 0. A step whose
    x is not finite is always skipped, and its x is never counted. If the step happens, x is
    counted. If the step is skipped, x is counted with `keep_skipped`, or after more than `patience`
    consecutive skipped steps.
    """
    happens = finite(x)
    if happens and len(state.values) >= max(least, 2):
        var = statistics.variance(state.values)
        excess = x - statistics.mean(state.values)
        happens = not (var > 0 and excess > 0 and excess * excess > sigmas * sigmas * var)
    row = 0 if happens else state.row + 1
    counts = finite(x) and (happens or row > patience or keep_skipped)
    values = (*state.values, x)[-window:] if counts else state.values
    return happens, SpikeState(values, row)
