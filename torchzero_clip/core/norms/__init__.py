"""Norms, right to 1e-6 whatever the size and range: the room that knows about precision."""

from torchzero_clip.core.norms.measures import (
    NAMED,
    Measure,
    Ord,
    divisions,
    finish,
    measure,
    merge,
    scaled,
)
from torchzero_clip.core.norms.numeric import numbers
from torchzero_clip.core.norms.percentile import percentile
from torchzero_clip.core.norms.slices import slice_statistics
from torchzero_clip.core.norms.whole import largest, statistics

__all__ = [
    "NAMED",
    "Measure",
    "Ord",
    "divisions",
    "finish",
    "largest",
    "measure",
    "merge",
    "numbers",
    "percentile",
    "scaled",
    "slice_statistics",
    "statistics",
]
