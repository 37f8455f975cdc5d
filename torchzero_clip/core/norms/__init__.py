"""Norms, right to 1e-6 whatever the size and range: all that knows about precision and shards."""

from torchzero_clip.core.norms.measures import (
    NAMED,
    Measure,
    Ord,
    all_ones,
    divisions,
    finish,
    in_two,
    measure,
    merge,
    scaled,
)
from torchzero_clip.core.norms.numeric import numbers, readable
from torchzero_clip.core.norms.percentile import percentile
from torchzero_clip.core.norms.slices import slice_statistics
from torchzero_clip.core.norms.whole import largest, statistics

__all__ = [
    "NAMED",
    "Measure",
    "Ord",
    "all_ones",
    "divisions",
    "finish",
    "in_two",
    "largest",
    "measure",
    "merge",
    "numbers",
    "percentile",
    "readable",
    "scaled",
    "slice_statistics",
    "statistics",
]
