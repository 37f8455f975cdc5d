"""One method against another on the same seeds: its numbers, its verdict, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.guide.paired import holm, interval, shift, wilcoxon

WORST = 1e6  # a run without a result counts as this: worse than any other
HUGE = WORST / 4  # a shift beyond it is between runs with a result and runs without one
CHANCE = 0.05
SAME = "not significantly different"
Scores = Mapping[int, float]  # by seed; the smaller the better


@dataclass
class Comparison:
    """A method against another on the same seeds; a shift below zero is in the method's favor.

    Attributes:
        trouble: The task.
        method, other: What is compared.
        pairs: How many seeds both have.
        equal: In how many of them both have the same score.
        shift: The Hodges–Lehmann estimate of the difference.
        low, high: Its exact 95 % interval, which is not corrected.
        p: The exact signed-rank test.
        corrected: p after Holm's correction.
        family: For how many comparisons p is corrected.
        failed, other_failed: How many runs of either came to no result.
        failing: What such a run did.
    """

    trouble: str
    method: str
    other: str
    pairs: int
    equal: int
    shift: float
    low: float
    high: float
    p: float
    corrected: float = math.nan
    family: int = 1
    failed: int = 0
    other_failed: int = 0
    failing: str = "diverged"

    @property
    def apart(self) -> bool:
        """Whether the interval, which is not corrected, excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def verdict(self) -> str:
        """Return better or worse if the corrected test and the interval both say so."""
        if self.corrected > CHANCE or not self.apart:
            return SAME
        return "better" if self.shift < 0 else "worse"

    def __str__(self) -> str:
        """Return the verdict with the shift and its interval, or with the runs that failed."""
        return self.told()

    def told(self, more: str = "") -> str:
        """Return the same, with `more` inside the brackets."""
        if abs(self.shift) > HUGE:
            return f"{self.verdict} ({self.failures}{more})"
        least, most = sorted([abs(self.low), abs(self.high)])
        span = f"{size(least)} to {size(most)}"
        if self.verdict != SAME:
            return f"{size(abs(self.shift))} {self.verdict} ({span}{more})"
        if self.apart:
            side = "better" if self.high < 0 else "worse"
            return f"not significantly {side} (uncorrected interval: {span}{more})"
        return f"{SAME} ({signed(self.low)} to {signed(self.high)}{more})"

    def with_p(self) -> str:
        """Return the same with the corrected p."""
        return self.told(f"; p = {self.corrected:.2g}")

    @property
    def failures(self) -> str:
        own, other = self.failed, self.other_failed
        return f"{own} of {self.pairs} {self.failing}, against {other} of {self.pairs}"


def compared(
    trouble: str, method: str, other: str, own: Scores, theirs: Scores, failing: str = "diverged"
) -> Comparison:
    """Return the comparison by the seeds that both have; `corrected` is filled by `correct`."""
    seeds = sorted(own.keys() & theirs.keys())
    away = [  # of the four digits that the files have
        round(min(own[seed], WORST) - min(theirs[seed], WORST), 6) for seed in seeds
    ]
    low, high = interval(away)
    return Comparison(
        trouble=trouble,
        method=method,
        other=other,
        pairs=len(seeds),
        equal=away.count(0),
        shift=shift(away),
        low=low,
        high=high,
        p=wilcoxon(away),
        failed=sum(math.isinf(own[seed]) for seed in seeds),
        other_failed=sum(math.isinf(theirs[seed]) for seed in seeds),
        failing=failing,
    )


def correct(family: Iterable[Comparison]) -> None:
    """Correct the p of all these together."""
    found = list(family)
    for comparison, p in zip(found, holm([x.p for x in found]), strict=True):
        comparison.corrected = p
        comparison.family = len(found)


def size(value: float) -> str:
    """Return two digits, a whole number from 100 on."""
    if value > HUGE:
        return "∞"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def signed(value: float) -> str:
    """Return the same with a sign; a zero has none."""
    sign = "−" if value < 0 else "+" * (value > 0)
    return sign + size(abs(value))
