"""Statistics of pairs: the Hodges–Lehmann shift, its exact interval, the signed-rank test, Holm.

All three come from the same signed ranks, so that an interval and a test of the same pairs agree:
without ties and zeros the test rejects at 5 % exactly if the 95 % interval excludes zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

LEVEL = 0.95


def averages(differences: Sequence[float]) -> Tensor:
    """Return the Walsh averages in ascending order: the mean of every two pairs, and each pair."""
    values = torch.tensor(differences, dtype=torch.float64)
    first, second = torch.triu_indices(len(values), len(values))
    return ((values[first] + values[second]) / 2).sort().values


def shift(differences: Sequence[float]) -> float:
    """Return the Hodges–Lehmann estimate of the difference: the median of the Walsh averages."""
    return middle(averages(differences)).item()


def interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Return the exact signed-rank interval of the shift.

    Its ends are Walsh averages. It covers the shift at least as often as `level` says, for any
    symmetric distribution of differences; with fewer than six pairs no interval can do that at
    95 %, and the ends are the least and the largest difference.
    """
    ordered = averages(differences)
    cut = left_out(len(differences), level)
    return ordered[cut].item(), ordered[-1 - cut].item()


def left_out(pairs: int, level: float = LEVEL) -> int:
    """Return how many Walsh averages lie outside the interval at either end."""
    tail = (1 - level) / 2
    sums = accumulate(ways(range(1, pairs + 1)))
    return max(sum(count <= tail * 2**pairs for count in sums) - 1, 0)


def coverage(pairs: int, level: float = LEVEL) -> float:
    """Return how often the interval of so many pairs covers the shift."""
    outside = sum(ways(range(1, pairs + 1))[: left_out(pairs, level) + 1])
    return 1 - 2 * outside / 2**pairs


def ways(ranks: Sequence[int]) -> list[int]:
    """Return for each sum how many choices of these ranks have it."""
    total = sum(ranks)
    found = [1] + [0] * total
    for rank in ranks:
        for sum_ in range(total, rank - 1, -1):
            found[sum_] += found[sum_ - rank]
    return found


def middle(values: Tensor) -> Tensor:
    """Return the median of the last dim; of an even number, the mean of the two in the middle."""
    ordered, count = values.sort(-1).values, values.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def wilcoxon(differences: Sequence[float]) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test, exact with ties as well.

    Zeros are skipped, equal sizes share their mean rank, and p is computed over all ways to choose
    the signs of these ranks.
    """
    values = [d for d in differences if d != 0]
    if not values:
        return 1.0
    ranks = doubled_ranks([abs(d) for d in values])
    positive = sum(rank for rank, d in zip(ranks, values, strict=True) if d > 0)
    least = min(positive, sum(ranks) - positive)
    return min(1.0, 2 * sum(ways(ranks)[: least + 1]) / 2 ** len(ranks))


def doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Return twice the rank of each, from 1; equal ones share their mean, then a whole number."""
    ordered = sorted(sizes)
    first = {size: ordered.index(size) for size in ordered}
    return [2 * first[size] + 1 + ordered.count(size) for size in sizes]


def holm(chances: Sequence[float]) -> list[float]:
    """Return the p of each test, corrected for their number (Holm)."""
    order = sorted(range(len(chances)), key=lambda i: chances[i])
    out, largest = [0.0] * len(chances), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[i]))
        out[i] = largest
    return out
