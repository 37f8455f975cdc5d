"""A study: runs of methods that are missing from a file, and what the file says of them."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.guide.comparison import Comparison, Scores, compared, correct, signed
from benchmarks.guide.report import markdown
from benchmarks.rows import digits, read
from examples.published.charts import Points

ROOT = Path(__file__).parents[2]
FILES = ROOT / "benchmarks" / "results" / "published"  # those that the page is made of
NAMES = (
    "heavy_tails",
    "grokking",
    "prodigy",
    "schedule_free",
    "large_batches",
    "batch_rates",
    "smoothness",
    "soap",
)
Questions = Mapping[str, Mapping[str, tuple[Scores, Scores]]]
ENOUGH = 10  # seeds, for a comparison to be claimed
FURTHER = 5  # rates that are tried as well, one after the other, where an end of the grid is best


@dataclass(frozen=True)
class Row:
    """A run: its seconds on one core, and what it measured, in the order of its study."""

    case: str
    method: str
    rate: float
    seed: int
    seconds: float
    values: str

    @property
    def numbers(self) -> list[float]:
        return [float(value) for value in self.values.split()]

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.case, self.method, self.rate, self.seed


@dataclass(frozen=True)
class Study:
    """What is run, how it is judged, and how it is shown.

    Attributes:
        name: Of the script, and of its file.
        cases: The methods of each case.
        rates: Those that are searched for a method of a case; of a single one nothing is searched.
        run: (case, method, rate, seed) → what was measured.
        score: What a run is judged by, the smaller the better.
        columns: What the table shows of a run, the median of seeds.
        against: The method that the others are compared with.
        picture: The figure.
        further: Other questions, each with its comparisons by name, of two scores by seed.
        tuning: The seeds that rates are chosen on, which no result uses.
        first: The case that rates are searched in; without one each case has rates of its own.
        result: What runs are compared by, if that is not the score; infinite if a run failed.
        failing: What a run did that failed.
        untested: Cases whose comparisons have no test, as their runs hardly differ by seed.
        ranged: Columns that show the least and the largest of seeds instead of their median.
    """

    name: str
    cases: Mapping[str, Sequence[str]]
    rates: Callable[[str, str], Sequence[float]]
    run: Callable[..., Sequence[float]]
    score: Callable[[Sequence[float]], float]
    columns: Mapping[str, Callable[[Sequence[float]], float]]
    against: str
    picture: Callable[[Results], str]
    further: Callable[[Results], Questions] = lambda found: {}
    tuning: Sequence[int] = (100,)
    first: str | None = None
    result: Callable[[Sequence[float]], float] | None = None
    failing: str = "diverged"
    untested: Sequence[str] = ()
    ranged: Sequence[str] = ()

    def judged(self, values: Sequence[float]) -> float:
        """The score; infinite where it is not a number."""
        score = self.score(values)
        return score if math.isfinite(score) else math.inf

    def outcome(self, values: Sequence[float]) -> float:
        """Return what runs are compared by."""
        return self.judged(values) if self.result is None else self.result(values)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(case, method) for case, methods in self.cases.items() for method in methods]


@dataclass(frozen=True)
class Results:
    """The rows of a study, and what they come to."""

    study: Study
    rows: Sequence[Row]

    def tuned(self, case: str, method: str) -> dict[float, float]:
        """The mean score of each rate that all seeds of tuning have run."""
        case = self.study.first or case
        found: dict[float, dict[int, float]] = {}
        for row in self.rows:
            if (row.case, row.method) == (case, method) and row.seed in self.study.tuning:
                found.setdefault(row.rate, {})[row.seed] = self.study.judged(row.numbers)
        whole = {rate: x for rate, x in found.items() if len(x) == len(self.study.tuning)}
        return {rate: statistics.mean(x.values()) for rate, x in whole.items()}

    def grid(self, case: str, method: str) -> list[float]:
        """The rates to search: those of the study, and the next where an end is best."""
        case = self.study.first or case
        rates, means = sorted(self.study.rates(case, method)), self.tuned(case, method)
        for _ in range(FURTHER if len(rates) > 1 else 0):
            if not means.keys() >= {*rates}:
                break
            best, step = min(rates, key=means.__getitem__), rates[1] / rates[0]
            if best == rates[0]:
                rates.insert(0, digits(best / step))
            elif best == rates[-1]:
                rates.append(digits(best * step))
        return rates

    def best(self, case: str, method: str) -> float | None:
        """The rate with the smallest mean score, once all are there."""
        rates, means = self.grid(case, method), self.tuned(case, method)
        if len(rates) == 1:
            return rates[0]
        return min(rates, key=means.__getitem__) if means.keys() >= {*rates} else None

    def values(self, case: str, method: str) -> dict[int, list[float]]:
        """What each seed measured at the rate that was chosen."""
        chosen = case, method, self.best(case, method)
        rows = [row for row in self.rows if row.seed not in self.study.tuning]
        return {row.seed: row.numbers for row in rows if row.key[:3] == chosen}

    def scores(self, case: str, method: str) -> dict[int, float]:
        return self.by(self.study.outcome, case, method)

    def by(
        self, measure: Callable[[Sequence[float]], float], case: str, method: str
    ) -> dict[int, float]:
        """Return a measure of what each seed came to."""
        return {seed: measure(values) for seed, values in self.values(case, method).items()}

    def missing(self, seeds: int) -> list[tuple[str, str, float, int]]:
        """What has to run next: rates to search, and where there are none the results."""
        done = {row.key for row in self.rows}
        every = self.study.pairs
        searched = [(pair, self.grid(*pair)) for pair in every]
        runs = [
            (*pair, rate, seed)
            for pair, rates in searched
            for rate in (rates if len(rates) > 1 and self.study.first in (None, pair[0]) else ())
            for seed in self.study.tuning
        ]
        if left := [run for run in runs if run not in done]:
            return left
        wanted = [(*pair, self.best(*pair) or 0.0, seed) for seed in range(seeds) for pair in every]
        return [run for run in wanted if run not in done]

    def points(self, case: str, method: str, xs: Sequence[float], first: int = 0) -> Points:
        """A curve: what the seeds measured at each x, from the first of their numbers on."""
        found = list(self.values(case, method).values())
        return [(x, [v[first + i] for v in found]) for i, x in enumerate(xs)]

    @cached_property
    def seeds(self) -> int:
        """How many every method of every case has."""
        return min(len(self.values(*pair)) for pair in self.study.pairs)

    @cached_property
    def comparisons(self) -> dict[tuple[str, ...], Comparison]:
        """Return methods against others on the same seeds.

        The comparisons with `against` are corrected together, and those of each further question.
        """
        study, other = self.study, self.study.against
        made: dict[tuple[str, ...], Comparison] = {}
        for case, method in study.pairs:
            if method == other or case in study.untested:
                continue
            own, theirs = self.scores(case, method), self.scores(case, other)
            if own.keys() & theirs.keys():
                made[case, method, other] = compared(
                    case, method, other, own, theirs, study.failing
                )
        correct(made.values())
        for question, pairs in study.further(self).items():
            asked = {
                (question, name): compared(question, name, "", own, theirs)
                for name, (own, theirs) in pairs.items()
                if own.keys() & theirs.keys()
            }
            correct(asked.values())
            made |= asked
        return made

    def table(self) -> str:
        """Each method of each case: its rate, what it came to, and how far from another it is."""
        study, lines, few = self.study, [], len(self.study.cases) == 1
        for case, method in study.pairs:
            found = self.values(case, method).values()
            cells = [
                (span if name in study.ranged else shown)([column(x) for x in found])
                for name, column in study.columns.items()
            ]
            comparison = self.comparisons.get((case, method, study.against))
            last = told(comparison) if comparison else ""
            lines.append((case, method, f"{self.best(case, method):.3g}", *cells, last)[few:])
        head = ("", "", "rate", *study.columns, f"against {study.against}")[few:]
        further = [
            f"- {': '.join(k)}: {told(x)}" for k, x in self.comparisons.items() if len(k) == 2
        ]
        return "\n\n".join([markdown(head, lines), *["\n".join(further)] * bool(further)])

    def cell(self, *words: str) -> str:
        """What stands in a column, the last word, of the row that begins with the others; or what a
        further comparison came to.
        """
        if words in self.comparisons:
            return told(self.comparisons[words])
        rows = [line.split("|")[1:-1] for line in self.table().splitlines() if "|" in line]
        head, _, *rows = [[cell.strip() for cell in row] for row in rows]
        *first, last = words
        (row,) = [row for row in rows if row[: len(first)] == first]
        return row[head.index(last)]

    def circumstances(self) -> str:
        """How much ran."""
        pairs = [pair for pair in self.study.pairs if self.study.first in (None, pair[0])]
        grids = [(self.grid(*pair), self.best(*pair)) for pair in pairs]
        searched = [(grid, best) for grid, best in grids if len(grid) > 1]
        ends = sum(best in (grid[0], grid[-1]) for grid, best in searched)
        minutes = sum(row.seconds for row in self.rows) / 60
        tuned = f"{len(self.study.tuning)} more seed{'s' * (len(self.study.tuning) > 1)}"
        text = (
            f"This study has {self.seeds} seeds and {len(self.rows)} runs, which took "
            f"{minutes:.1f} minutes of one core."
        )
        if searched:
            text += (
                f" Learning rates were searched with {tuned}. The best rate is at an end of the "
                f"grid in {ends} of {len(searched)} searches."
            )
        return text


def shown(values: Sequence[float]) -> str:
    """The median of seeds, and how many came to nothing."""
    if all(map(math.isnan, values)):
        return ""
    lost = sum(not math.isfinite(x) for x in values)
    middle = statistics.median([x if math.isfinite(x) else math.inf for x in values])
    text = "∞" if middle == math.inf else f"{middle:.0f}" if middle >= 1000 else f"{middle:.3g}"
    return f"{text}, ∞ in {lost} of {len(values)}" if 0 < lost < len(values) else text


def span(values: Sequence[float]) -> str:
    """The least and the largest of seeds."""
    return "" if any(map(math.isnan, values)) else f"{min(values):.2f} to {max(values):.2f}"


def told(comparison: Comparison) -> str:
    """A comparison; of few seeds the difference and its ends alone, and no verdict."""
    if comparison.pairs >= ENOUGH:
        return comparison.with_p()
    return f"{signed(comparison.shift)} ({signed(comparison.low)} to {signed(comparison.high)})"


def of(name: str) -> Study:
    """The study of a script."""
    return importlib.import_module(f"examples.published.{name}").STUDY


def results(name: str, folder: Path = FILES) -> Results:
    """What a file says."""
    return Results(of(name), read(folder / f"{name}.csv", Row))


def one(name: str, case: str, method: str, rate: float, seed: int, **options: Any) -> Row:
    """A run from its seed, on one core."""
    torch.set_num_threads(1)  # the same sums, whatever the machine has
    torch.manual_seed(seed)
    begin = time.process_time()
    values = of(name).run(case, method, rate, seed, **options)
    text = " ".join([f"{digits(value):g}" for value in values])
    return Row(case, method, rate, seed, digits(time.process_time() - begin), text)
