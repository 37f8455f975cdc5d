"""Weights for evaluation against schedules, on paired seeds of a small language model.

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

from benchmarks.guide.paired import interval, wilcoxon
from benchmarks.guide.runs import GRID, SEEDS, SIZE, TEXT, TUNING, Row, best, beyond, key, tuned
from benchmarks.guide.troubles import Nothing
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
NAME, AGAINST = "language, 600 steps", "cosine"


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


def one(method: str, rate: float, seed: int, steps: int = STEPS) -> Row:
    """A run from its seed, judged at its weights for evaluation: the median of the last tests."""
    torch.manual_seed(seed)
    task = Nothing(SIZE, TEXT, seed)
    chain, schedule = METHODS[method]
    opt = Modular(task.model.named_parameters(), chain())
    tests = []
    for step in range(steps):
        opt.param_groups[0]["lr"] = rate * task.rates["Adam"] * schedule(step)
        loss, _ = task.losses()
        opt.zero_grad()
        loss.backward()
        opt.step()
        left = steps - 1 - step
        if left % 10 == 0 and left < 10 * TESTS:
            opt.eval()
            tests.append(task.test().item())
            opt.train()
    final = statistics.median(tests) if all(map(math.isfinite, tests)) else math.inf
    return Row(NAME, method, rate, seed, digits(final))


def missing(rows: Sequence[Row]) -> Iterator[tuple[str, float, int]]:
    """What has to run next: the tuning, then the results seed by seed; `rows` may grow."""
    done = {key(row)[1:] for row in rows}
    yield from (x for x in product(METHODS, GRID, TUNING) if x not in done)
    for method in METHODS:
        outer = beyond(tuned(rows, NAME, method))
        yield from (x for x in product([method], outer, TUNING) if x not in done)
    rates = {method: best(rows, NAME, method) for method in METHODS}
    for seed, (method, rate) in product(SEEDS, rates.items()):
        if rate is not None and (method, rate, seed) not in done:
            yield method, rate, seed


def table(rows: Sequence[Row]) -> str:
    """For each method its rate, its loss, and the differences from cosine in pairs of seeds."""
    found = {row.method: {} for row in rows}  # type: dict[str, dict[int, float]]
    for row in rows:
        if row.seed in SEEDS and row.rate == best(rows, NAME, row.method):
            found[row.method][row.seed] = row.final_loss
    lines = ["| | rate | seeds | loss | difference | 95 % | p |", "|---|---|---|---|---|---|---|"]
    for method, losses in found.items():
        pairs = [losses[seed] - found[AGAINST][seed] for seed in losses if seed in found[AGAINST]]
        if not pairs:
            continue
        low, high = interval(pairs)
        rate, loss = best(rows, NAME, method), statistics.median(losses.values())
        away = (
            f"{statistics.median(pairs):+.4f} | {low:+.4f} to {high:+.4f} | {wilcoxon(pairs):.2g}"
        )
        lines.append(f"| {method} | {rate:g} | {len(pairs)} | {loss:.4f} | {away} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="when to stop")
    parser.add_argument(
        "--table", action="store_true", help="run nothing, print what the file says"
    )
    parser.add_argument("--out", type=Path, default=FILE, help="the file that runs are added to")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    rows, end = read(options.out, Row), time.monotonic() + 60 * options.minutes

    def made() -> Iterator[Row]:
        for wanted in missing(rows):
            if time.monotonic() > end:
                break
            rows.append(one(*wanted))
            yield rows[-1]

    if not options.table:
        write(options.out, Row, made(), more=True)
    print(table(rows))


if __name__ == "__main__":
    main()
