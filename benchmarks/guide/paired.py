"""Statistics of pairs: an interval by the bootstrap, Wilcoxon's test, Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RESAMPLES = 10_000


def interval(
    differences: Sequence[float], level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Where the median difference of pairs lies, by the percentiles of resampled pairs."""
    values = torch.tensor(differences, dtype=torch.float64)
    source = torch.Generator().manual_seed(seed)
    places = torch.randint(len(values), (RESAMPLES, len(values)), generator=source)
    medians = middle(values[places])
    tail = (1 - level) / 2
    low, high = medians.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def middle(values: Tensor) -> Tensor:
    """The median of the last dim, with the mean of the two in the middle of an even number."""
    ordered, count = values.sort(-1).values, values.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2


def wilcoxon(differences: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test, exact, ties and all.

    Zeros are left out, equal sizes share their mean rank, and the chance is that of all ways to
    choose the signs of these ranks.
    """
    values = [d for d in differences if d != 0]
    if not values:
        return 1.0
    ranks = doubled_ranks([abs(d) for d in values])
    total = sum(ranks)
    ways = [1] + [0] * total  # how many choices of signs give each sum of the positive ones
    for rank in ranks:
        for sum_ in range(total, rank - 1, -1):
            ways[sum_] += ways[sum_ - rank]
    positive = sum(rank for rank, d in zip(ranks, values, strict=True) if d > 0)
    least = min(positive, total - positive)
    return min(1.0, 2 * sum(ways[: least + 1]) / 2 ** len(ranks))


def doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Twice the rank of each, from 1; equal ones share their mean, which is then a whole number."""
    ordered = sorted(sizes)
    first = {size: ordered.index(size) for size in ordered}
    return [2 * first[size] + 1 + ordered.count(size) for size in sizes]


def holm(chances: Sequence[float]) -> list[float]:
    """The p of each test, corrected for there being so many (Holm)."""
    order = sorted(range(len(chances)), key=lambda i: chances[i])
    out, largest = [0.0] * len(chances), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[i]))
        out[i] = largest
    return out
