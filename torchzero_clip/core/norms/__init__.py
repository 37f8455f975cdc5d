"""Norms of tensors of any size and range, with a relative error of at most 1e-6."""

from torchzero_clip.core.norms.measures import (
    NAMED,
    Measure,
    Ord,
    divisions,
    factor_of,
    finish,
    halves,
    in_two,
    known_divisor,
    measure,
    merge,
)
from torchzero_clip.core.norms.numeric import eps_of, finite, is_one_operator, numbers, readable
from torchzero_clip.core.norms.percentile import percentile, percentiles, percentiles_of_ranks
from torchzero_clip.core.norms.products import entrywise, products
from torchzero_clip.core.norms.slices import OfRows, SliceRows, statistics_of_slices
from torchzero_clip.core.norms.whole import joint_norm, largest, statistics

__all__ = [
    "NAMED",
    "Measure",
    "OfRows",
    "Ord",
    "SliceRows",
    "divisions",
    "entrywise",
    "eps_of",
    "factor_of",
    "finish",
    "finite",
    "halves",
    "in_two",
    "is_one_operator",
    "joint_norm",
    "known_divisor",
    "largest",
    "measure",
    "merge",
    "numbers",
    "percentile",
    "percentiles",
    "percentiles_of_ranks",
    "products",
    "readable",
    "statistics",
    "statistics_of_slices",
]
