"""Comparisons of pairs, with intervals and corrected for their number, as tables and sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from benchmarks.guide.comparison import HUGE, WORST, Comparison, compared, correct
from benchmarks.guide.paired import middle
from benchmarks.guide.runs import (
    BEYOND,
    CASES,
    MATRICES,
    METHODS,
    SEEDS,
    SIZE,
    TEXT,
    TUNING,
    Row,
    best,
    tuning,
)
from benchmarks.guide.troubles import TROUBLES
from benchmarks.rows import read

FILE = Path(__file__).parents[1] / "results" / "guide.csv"
FIXED = "Adam, global 1"  # what the other rules of Adam are compared with, too
NONE = "Adam, no clipping"
SCOPES = (  # other comparisons: the same clip for each and for all
    ("Adam, AdaGC", "Adam, AdaGC, global"),
    *[(f"{name}, clip inside", f"{name}, clip outside") for name in MATRICES],
)
BESIDE = (  # methods for matrices beside Adam and beside each other, each with the same limit
    *[(f"{name}, clip outside", FIXED) for name in MATRICES],
    *[(f"{name}, clip outside", "Muon, clip outside") for name in MATRICES if name != "Muon"],
)


@cache
def results(file: Path = FILE) -> tuple[Row, ...]:
    """The runs so far."""
    return tuple(read(file, Row))


def wanted() -> Iterator[tuple[str, str, str]]:
    """All comparisons: with no clipping of the same optimizer, with a fixed limit, and others."""
    for trouble, methods in CASES.items():
        for method in methods:
            none = f"{optimizer_of(method)}, no clipping"
            if method != none:
                yield trouble, method, none
            if optimizer_of(method).startswith("Adam") and method not in (FIXED, NONE):
                yield trouble, method, FIXED
        pairs = (*SCOPES, *BESIDE)
        yield from ((trouble, *pair) for pair in pairs if {*pair} <= {*methods})


def optimizer_of(method: str) -> str:
    """What stands behind the rule; what is more than Adam itself is compared with Adam."""
    first, *rest = method.split(",")
    return first if rest else "Adam"


@cache
def compare(rows: tuple[Row, ...]) -> dict[tuple[str, str, str], Comparison]:
    """Every comparison that has pairs, corrected over all of them."""
    made = {}
    for trouble, method, other in wanted():
        own, theirs = losses(rows, trouble, method), losses(rows, trouble, other)
        if len(own.keys() & theirs.keys()) > 1:
            made[trouble, method, other] = compared(trouble, method, other, own, theirs)
    correct(made.values())
    return made


def losses(rows: Sequence[Row], trouble: str, method: str) -> dict[int, float]:
    """The losses by seed, at the rate that tuning chose."""
    rate = best(rows, trouble, method)
    return {
        row.seed: row.final_loss
        for row in rows
        if (row.trouble, row.method, row.rate) == (trouble, method, rate) and row.seed in SEEDS
    }


# ---------------------------------------------------------------------- tables


def middle_loss(found: Sequence[float]) -> str:
    """The median of losses, and how many are none."""
    lost = sum(map(math.isinf, found))
    median = middle(torch.tensor([min(loss, WORST) for loss in found], dtype=torch.float64)).item()
    text = "∞" if median > HUGE else f"{median:.3g}"
    return f"{text}, {lost} of {len(found)} diverged" if lost else text


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table(rows: tuple[Row, ...], trouble: str) -> str:
    """The methods of a trouble: their loss, and how far it is from others of the same seeds."""
    made, lines = compare(rows), []
    for method in CASES[trouble]:
        found = losses(rows, trouble, method)
        if not found:
            continue
        none = f"{optimizer_of(method)}, no clipping"
        cells = [cell(made.get((trouble, method, other))) for other in (none, FIXED)]
        rate = f"{best(rows, trouble, method):g}"
        lines.append((method, rate, middle_loss([*found.values()]), *cells))
    head = ("", "rate", "loss", "against no clipping", "against `global 1`")
    seeds = min(len(losses(rows, trouble, method)) for method in CASES[trouble])
    return f"All methods use the same {seeds} seeds:\n\n{markdown(head, lines)}"


def cell(comparison: Comparison | None) -> str:
    return "" if comparison is None else comparison.with_p()


def others(rows: tuple[Row, ...], pairs: Sequence[tuple[str, str]]) -> str:
    """The comparisons of some pairs, in all troubles."""
    found = [x for (_, *pair), x in compare(rows).items() if tuple(pair) in pairs]
    lines = [(x.trouble, x.method, x.other, cell(x)) for x in found]
    return markdown(("setting", "method", "compared with", "difference"), lines)


def chains(rows: tuple[Row, ...]) -> str:
    """What the methods are."""
    task = TROUBLES["bad batches"](SIZE, TEXT, 0)
    lines = []
    for name, make in METHODS.items():
        spelled = re.sub(r"labels=\{.*?\}", "labels=matrices_and_rest(model)", repr(make(task)))
        lines.append((name, f"`{spelled}`"))
    return markdown(("", "before `LR`"), lines)


def budget(rows: tuple[Row, ...]) -> str:
    """What was run for each trouble, and how sure the choice of rates is: how often the best one
    was the last one tried, and how often the seeds of tuning would have chosen different ones."""
    lines = []
    for trouble, methods in CASES.items():
        seeds = [len(losses(rows, trouble, method)) for method in methods]
        rates = [best(rows, trouble, method) for method in methods]
        ends = sum(rate in BEYOND.values() for rate in rates)
        split = sum(disagree(tuning(rows, trouble, method)) for method in methods)
        runs = sum(row.trouble == trouble and row.seed in TUNING for row in rows)
        counts = (len(methods), runs, sum(seeds), min(seeds), ends, split)
        lines.append((trouble, *map(str, counts)))
    head = ("setting", "methods", "tuning runs", "result runs", "seeds")
    return markdown((*head, "rates 0.1 or 10", "tuning seeds disagree"), lines)


def disagree(found: Mapping[float, tuple[float, ...]]) -> bool:
    """Whether the seeds of tuning, each alone, would choose different rates."""
    choices = {
        min(found, key=lambda rate: found[rate][i], default=None) for i in range(len(TUNING))
    }
    return len(choices) > 1


def named(trouble: str) -> str:
    """Return the name of a trouble in a comment of a page."""
    return trouble.replace(",", "").replace(" ", "_")


def tables(rows: tuple[Row, ...]) -> dict[str, str]:
    """All that the page asks for, by name."""
    return {
        "budget": budget(rows),
        "count": f"{len(compare(rows))} comparisons",
        "chains": chains(rows),
        **{named(trouble): table(rows, trouble) for trouble in CASES},
        "others": others(rows, SCOPES),
        "matrices": others(rows, BESIDE),
    }
