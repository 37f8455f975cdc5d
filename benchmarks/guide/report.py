"""Comparisons of pairs, with intervals and corrected for their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.guide.paired import holm, interval, middle, wilcoxon
from benchmarks.guide.runs import METHODS, SEEDS, Row, best
from benchmarks.which_rule.troubles import TROUBLES

WORST = 1e6  # a run that diverged counts as this loss: worse than any other
CHANCE = 0.05


@dataclass
class Comparison:
    """A method against another on the same seeds; a difference below zero is in its favour."""

    trouble: str
    method: str
    other: str
    pairs: int
    median: float
    low: float
    high: float
    chance: float

    @property
    def verdict(self) -> str:
        """Who is better, if anybody."""
        if self.chance > CHANCE:
            return "no difference"
        return "better" if self.median < 0 else "worse"


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Every method against no clipping of its optimizer, corrected over all of them."""
    made = []
    for trouble in TROUBLES:
        for method in METHODS:
            other = f"{method.split(',')[0]}, no clipping"
            other = other if other in METHODS else "Adam, no clipping"
            own, theirs = losses(rows, trouble, method), losses(rows, trouble, other)
            seeds = sorted(own.keys() & theirs.keys())
            if method == other or len(seeds) < 2:
                continue
            away = [min(own[s], WORST) - min(theirs[s], WORST) for s in seeds]
            median = middle(torch.tensor(away, dtype=torch.float64)).item()
            low, high = interval(away)
            made.append(
                Comparison(trouble, method, other, len(seeds), median, low, high, wilcoxon(away))
            )
    for comparison, chance in zip(made, holm([x.chance for x in made]), strict=True):
        comparison.chance = chance
    return made


def losses(rows: Sequence[Row], trouble: str, method: str) -> dict[int, float]:
    """The losses by seed, at the rate that tuning chose."""
    rate = best([*rows], trouble, method)
    return {
        row.seed: row.final_loss
        for row in rows
        if (row.trouble, row.method, row.rate) == (trouble, method, rate) and row.seed in SEEDS
    }


def number(loss: float) -> str:
    return "diverged" if abs(loss) > WORST / 2 or math.isinf(loss) else f"{loss:+.3g}"


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| trouble | method | against | pairs | difference | 95 % | p, Holm | |",
        "|---|---|---|---:|---:|---|---:|---|",
    ]
    for x in compare(rows):
        cells = [x.trouble, x.method, x.other, str(x.pairs), number(x.median)]
        cells += [f"{number(x.low)} to {number(x.high)}", f"{x.chance:.2g}", x.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
