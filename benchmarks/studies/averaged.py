"""Weights for evaluation against schedules, on paired seeds of the guide's small trainings.

    python -m benchmarks.studies.averaged --minutes 20  # adds runs to a file until all are there
    python -m benchmarks.studies.averaged --table       # what results/averaged.csv says

Each method has a rate of its own, the best of a grid on two seeds that are not among the twenty.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.guide.comparison import Comparison, correct
from benchmarks.guide.comparison import compared as paired
from benchmarks.guide.report import cell, losses, markdown, middle_loss
from benchmarks.guide.runs import GRID, SEEDS, SIZE, TEXT, TUNING, Row, best, beyond, key, tuned
from benchmarks.guide.troubles import TROUBLES
from benchmarks.rows import digits, read, write
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Lookahead,
    Modular,
    ScheduleFree,
    Transform,
    WeightAverage,
    WeightDecay,
    WeightEMA,
)

FILE = Path(__file__).parents[1] / "results" / "averaged.csv"
STEPS, WARMUP, TESTS = 600, 30, 5
TASKS = {
    "language": TROUBLES["nothing wrong"],
    "language, bad batches": TROUBLES["bad batches"],
    "labels with heavy tails": TROUBLES["heavy tails"],
}


def constant(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP)


def cosine(step: int) -> float:
    return constant(step) * (1 + math.cos(math.pi * step / STEPS)) / 2


def adamw(*last: Transform, beta: float = 0.9) -> Chain:
    decay = WeightDecay(0.1)
    return Chain(ClipNorm(1.0, dim="global"), Adam((beta, 0.999)), decay, LR(1.0), *last)


METHODS: dict[str, tuple[Callable[[], Chain], Callable[[int], float]]] = {
    "cosine": (adamw, cosine),
    "constant": (adamw, constant),
    "Schedule-Free": (lambda: adamw(ScheduleFree(0.9), beta=0.0), constant),
    "constant, EMA 0.9": (lambda: adamw(WeightEMA(0.9)), constant),
    "constant, EMA 0.99": (lambda: adamw(WeightEMA(0.99)), constant),
    "constant, mean of the second half": (lambda: adamw(WeightAverage(STEPS // 2)), constant),
    "cosine, EMA 0.9": (lambda: adamw(WeightEMA(0.9)), cosine),
    "constant, Lookahead": (lambda: adamw(Lookahead()), constant),
}
AGAINST = ("cosine", "constant")
PAIRS = [(method, other) for method in METHODS for other in AGAINST if method not in AGAINST]
PAIRS.insert(0, ("constant", "cosine"))
PAIRS.append(("constant, mean of the second half", "constant, EMA 0.9"))


def one(task: str, method: str, rate: float, seed: int, steps: int = STEPS) -> Row:
    """A run from its seed, judged at its weights for evaluation: the median of the last tests."""
    torch.manual_seed(seed)
    training = TASKS[task](SIZE, TEXT, seed)
    chain, schedule = METHODS[method]
    opt = Modular(training.model.named_parameters(), chain())
    tests = []
    for step in range(steps):
        opt.param_groups[0]["lr"] = rate * training.rates["Adam"] * schedule(step)
        loss, clean = training.losses()
        if not math.isfinite(clean.item()):
            return Row(task, method, rate, seed, math.inf)
        opt.zero_grad()
        loss.backward()
        opt.step()
        left = steps - 1 - step
        if left % 10 == 0 and left < 10 * TESTS:
            opt.eval()
            tests.append(training.test().item())
            opt.train()
    final = statistics.median(tests) if all(map(math.isfinite, tests)) else math.inf
    final = final if final <= 2 * training.chance else math.inf
    return Row(task, method, rate, seed, digits(final))


def missing(rows: Sequence[Row]) -> Iterator[tuple[str, str, float, int]]:
    """What has to run next: of each task the tuning, then the results seed by seed; `rows` may
    grow.
    """
    done = {key(row) for row in rows}
    for task in TASKS:
        grids = ((task, *x) for x in product(METHODS, GRID, TUNING))
        yield from (x for x in grids if x not in done)
        for method in METHODS:
            outer = beyond(tuned(rows, task, method))
            yield from (
                x for x in ((task, method, *y) for y in product(outer, TUNING)) if x not in done
            )
        rates = {method: best(rows, task, method) for method in METHODS}
        for seed, (method, rate) in product(SEEDS, rates.items()):
            if rate is not None and (task, method, rate, seed) not in done:
                yield task, method, rate, seed


def compared(rows: Sequence[Row]) -> dict[tuple[str, str, str], Comparison]:
    """Each method against the schedule, and against its like without an average, on the same
    seeds; corrected over all of them.
    """
    made = {}
    for task, (method, other) in product(TASKS, PAIRS):
        own, theirs = losses(rows, task, method), losses(rows, task, other)
        if len(own.keys() & theirs.keys()) > 1:
            made[task, method, other] = paired(task, method, other, own, theirs)
    correct(made.values())
    return made


def table(rows: Sequence[Row], task: str) -> str:
    """For each method of a task its rate, its loss, and its differences in pairs of seeds."""
    made, lines = compared(rows), []
    for method in METHODS:
        if found := losses(rows, task, method):
            rate = f"{best(rows, task, method):g}"
            cells = [cell(made.get((task, method, other))) for other in AGAINST]
            lines.append((method, rate, middle_loss([*found.values()]), *cells))
    return markdown(("", "rate", "loss", *[f"against {other}" for other in AGAINST]), lines)


def results(file: Path = FILE) -> list[Row]:
    """The runs so far."""
    return read(file, Row)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """What the page asks for, by name."""
    names = {task: task.replace(", ", "_").replace(" ", "_") for task in TASKS}
    made = {name: table(rows, task) for task, name in names.items()}
    return {"count": f"{len(compared(rows))} comparisons", **made}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="when to stop")
    parser.add_argument(
        "--table", action="store_true", help="run nothing, print what the file says"
    )
    parser.add_argument("--out", type=Path, default=FILE, help="the file that runs are added to")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    rows, end = results(options.out), time.monotonic() + 60 * options.minutes

    def made() -> Iterator[Row]:
        for wanted in missing(rows):
            if time.monotonic() > end:
                break
            rows.append(one(*wanted))
            yield rows[-1]

    if not options.table:
        write(options.out, Row, made(), more=True)
    for task in TASKS:
        print(f"{task}\n\n{table(rows, task)}\n")


if __name__ == "__main__":
    main()
