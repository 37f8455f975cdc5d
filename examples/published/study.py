"""A study: it runs the methods that are missing from its file, and makes tables of the file."""

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
    """A run: its seconds on one core, and its measurements in the order of its study."""

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
    """The plan of a study: its runs, its scores, its comparisons and its picture.

    Attributes:
        name: The name of the script and of its file.
        cases: The methods of each case.
        rates: The learning rates to search for a method of a case. A single rate is not searched.
        run: A function that maps (case, method, rate, seed) to the measurements.
        score: The score of a run. A smaller score is better.
        columns: The columns of the table. Each shows the median over seeds.
        against: The method that the other methods are compared with.
        picture: A function that draws the figure.
        further: Other questions, each with comparisons by name, between two lists of scores.
        tuning: The seeds on which learning rates are chosen. No result uses them.
        first: The case in which learning rates are searched. Without it, each case has its own.
        result: The value by which runs are compared, if it is not the score. It is infinite if a
            run failed.
        failing: A description of a failed run.
        untested: Cases whose comparisons have no test, because their runs hardly differ by seed.
        ranged: Columns that show the least and the largest value instead of the median.
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
        """Return the score, or infinity if it is not a number."""
        score = self.score(values)
        return score if math.isfinite(score) else math.inf

    def outcome(self, values: Sequence[float]) -> float:
        """Return the score by which runs are compared."""
        return self.judged(values) if self.result is None else self.result(values)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(case, method) for case, methods in self.cases.items() for method in methods]


@dataclass(frozen=True)
class Results:
    """The rows of a study, and the tables and comparisons that follow from them."""

    study: Study
    rows: Sequence[Row]

    def tuned(self, case: str, method: str) -> dict[float, float]:
        """Return the mean score of each learning rate that all tuning seeds have run."""
        case = self.study.first or case
        found: dict[float, dict[int, float]] = {}
        for row in self.rows:
            if (row.case, row.method) == (case, method) and row.seed in self.study.tuning:
                found.setdefault(row.rate, {})[row.seed] = self.study.judged(row.numbers)
        whole = {rate: x for rate, x in found.items() if len(x) == len(self.study.tuning)}
        return {rate: statistics.mean(x.values()) for rate, x in whole.items()}

    def grid(self, case: str, method: str) -> list[float]:
        """Return the learning rates to search: the grid, and the next one if an end is best."""
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
        """Return the learning rate with the smallest mean score, if all rates have run."""
        rates, means = self.grid(case, method), self.tuned(case, method)
        if len(rates) == 1:
            return rates[0]
        return min(rates, key=means.__getitem__) if means.keys() >= {*rates} else None

    def values(self, case: str, method: str) -> dict[int, list[float]]:
        """Return the measurements of each seed at the chosen learning rate."""
        chosen = case, method, self.best(case, method)
        rows = [row for row in self.rows if row.seed not in self.study.tuning]
        return {row.seed: row.numbers for row in rows if row.key[:3] == chosen}

    def scores(self, case: str, method: str) -> dict[int, float]:
        return self.by(self.study.outcome, case, method)

    def by(
        self, measure: Callable[[Sequence[float]], float], case: str, method: str
    ) -> dict[int, float]:
        """Return a measurement by seed."""
        return {seed: measure(values) for seed, values in self.values(case, method).items()}

    def missing(self, seeds: int) -> list[tuple[str, str, float, int]]:
        """Return the missing runs: first the search of learning rates, then the results."""
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
        """Return a curve: the measurements of the seeds at each x, from the given position on."""
        found = list(self.values(case, method).values())
        return [(x, [v[first + i] for v in found]) for i, x in enumerate(xs)]

    @cached_property
    def seeds(self) -> int:
        """Return the number of seeds that every method of every case has."""
        return min(len(self.values(*pair)) for pair in self.study.pairs)

    @cached_property
    def comparisons(self) -> dict[tuple[str, ...], Comparison]:
        """Return the comparisons of methods on the same seeds.

        The comparisons with `against` are corrected together. The comparisons of each further
        question are corrected together as well.
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
        """Return a row for each method of each case: its learning rate, results and comparison."""
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

    @cached_property
    def _cells(self) -> list[list[str]]:
        rows = [line.split("|")[1:-1] for line in self.table().splitlines() if "|" in line]
        return [[cell.strip() for cell in row] for row in rows]

    def cell(self, *words: str) -> str:
        """Return a cell of the table, or a further comparison.

        Args:
            *words: The first cells of a row and then the name of a column, or the name of a further
                comparison.
        """
        if words in self.comparisons:
            return told(self.comparisons[words])
        head, _, *rows = self._cells
        *first, last = words
        (row,) = [row for row in rows if row[: len(first)] == first]
        return row[head.index(last)]

    def circumstances(self) -> str:
        """Return a sentence about the number of runs and their time."""
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
    """Return the median over seeds, and the number of seeds that failed."""
    if all(map(math.isnan, values)):
        return ""
    lost = sum(not math.isfinite(x) for x in values)
    middle = statistics.median([x if math.isfinite(x) else math.inf for x in values])
    text = "∞" if middle == math.inf else f"{middle:.0f}" if middle >= 1000 else f"{middle:.3g}"
    return f"{text}, ∞ in {lost} of {len(values)}" if 0 < lost < len(values) else text


def span(values: Sequence[float]) -> str:
    """Return the least and the largest value over seeds."""
    return "" if any(map(math.isnan, values)) else f"{min(values):.2f} to {max(values):.2f}"


def told(comparison: Comparison) -> str:
    """Return a comparison. With few seeds, it shows the difference without a verdict."""
    if comparison.pairs >= ENOUGH:
        return comparison.with_p()
    return f"{signed(comparison.shift)} ({signed(comparison.low)} to {signed(comparison.high)})"


def of(name: str) -> Study:
    """Return the study of a script."""
    return importlib.import_module(f"examples.published.{name}").STUDY


def results(name: str, folder: Path = FILES) -> Results:
    """Return the results in a file."""
    return Results(of(name), read(folder / f"{name}.csv", Row))


def one(name: str, case: str, method: str, rate: float, seed: int, **options: Any) -> Row:
    """Run a method from its seed, on one core."""
    torch.set_num_threads(1)  # the same sums, whatever the machine has
    torch.manual_seed(seed)
    begin = time.process_time()
    values = of(name).run(case, method, rate, seed, **options)
    text = " ".join([f"{digits(value):g}" for value in values])
    return Row(case, method, rate, seed, digits(time.process_time() - begin), text)
