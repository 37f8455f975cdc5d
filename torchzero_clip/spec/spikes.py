"""The rule that skips a step if a monitored value, such as the loss, spikes."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from torchzero_clip.spec.plain_numbers import Real, finite


class SpikeState(NamedTuple):
    """The last values that were counted, and the number of steps skipped in a row."""

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
    """Return whether the step happens: it is skipped if x - mean > sigmas · std.

    There is no limit before there are `least` values, or if their unbiased std is 0. A step whose
    x is not finite is always skipped. The value of a step that happens is counted. The value of a
    skipped step is counted if more than `patience` steps in a row were skipped, or with
    `keep_skipped`, but never if it is not finite.
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
