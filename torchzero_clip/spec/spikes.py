"""Steps that do not happen, by a value that is told."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from torchzero_clip.spec.plain_numbers import Real, finite


class SpikeState(NamedTuple):
    """The last values that counted, and how many steps in a row were skipped."""

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
    """Whether the step happens: not where x - mean > sigmas · std of at least `least` values.

    std is unbiased, and sets no limit where it is 0; an x that is no number does not happen. What
    happened counts, and what was skipped after `patience` others in a row; a NaN never does.
    """
    happens = finite(x)
    if happens and len(state.values) >= max(least, 2):
        var, away = statistics.variance(state.values), x - statistics.mean(state.values)
        happens = not (var > 0 and away > 0 and away * away > sigmas * sigmas * var)
    row = 0 if happens else state.row + 1
    counts = finite(x) and (happens or row > patience or keep_skipped)
    values = (*state.values, x)[-window:] if counts else state.values
    return happens, SpikeState(values, row)
