"""The methods, their learning rates, and a file that runs are added to until all are there."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rows import read, write
from benchmarks.which_rule.runs import Case, digits, train
from benchmarks.which_rule.troubles import SIZES, TROUBLES, Trouble
from torchzero_clip import (
    AGC,
    LR,
    AdaClip,
    AdaGC,
    AdaGN,
    Adam,
    AutoClip,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Momentum,
    Orthogonalize,
    Partition,
    Reset,
    SpikeClip,
    StableAdam,
    Transform,
    ZClip,
    matrices_and_rest,
)

TUNING = (100, 101, 102)  # the seeds that learning rates are chosen on
SEEDS = range(20)  # those of the results
GRID = (0.1, 0.3, 1.0, 3.0)  # in terms of the rate of *Which rule?*, which is for no clipping
NEVER = ClipNorm(math.inf, dim="global")  # measures, as the other rules do


def adam(*rule: Transform) -> Callable[[Trouble], list[Transform]]:
    return lambda task: [*rule, Adam()]


def sgd(*rule: Transform) -> Callable[[Trouble], list[Transform]]:
    return lambda task: [*rule, Momentum(0.9)]


def muon(
    outside: Transform | None = None, inside: Transform | None = None
) -> Callable[[Trouble], list[Transform]]:
    """Muon for matrices, Adam for the rest; a clip in front of both, or in front of each."""

    def make(task: Trouble) -> list[Transform]:
        front = [] if inside is None else [inside]
        matrices = Chain(
            *front, Momentum(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw")
        )
        parts = {"matrices": matrices, "rest": Chain(*front, Adam())}
        return [outside or NEVER, Partition(parts, matrices_and_rest(task.model))]

    return make


LIMIT = ClipNorm(1.0, dim="global")
RULES: dict[str, tuple[Transform, ...]] = {
    "no clipping": (NEVER,),
    "global 1": (LIMIT,),
    "each tensor 1": (ClipNorm(1.0),),
    "AGC": (AGC(),),
    "AdaGC": (AdaGC(),),
    "ZClip, at most 1": (ZClip(),),
    "AutoClip, 10 %, warmed": (AutoClip("percentile", 10.0, warmup=LIMIT),),
    "ClipNormByEMA": (ClipNormByEMA(),),
    "ClipNormGrowth": (ClipNormGrowth(),),
}
METHODS: dict[str, Callable[[Trouble], list[Transform]]] = {
    **{f"Adam, {name}": adam(*rule) for name, rule in RULES.items()},
    **{f"SGD, {name}": sgd(*rule) for name, rule in RULES.items()},
    "StableAdam": lambda task: [NEVER, StableAdam()],
    "SPAM": lambda task: [NEVER, Reset(Chain(SpikeClip(wait=20), Adam()), 500, 150)],
    "Stable-SPAM": lambda task: [NEVER, AdaClip(), AdaGN(), Reset(Adam(), 1000)],
    "Muon, no clipping": muon(),
    "Muon, clip outside": muon(outside=LIMIT),
    "Muon, clip inside": muon(inside=LIMIT),
}


@dataclass
class Row:
    """A line of guide.csv: a run. The rate is a multiple of the trouble's own."""

    trouble: str
    method: str
    rate: float
    seed: int
    final_loss: float


def key(row: Row) -> tuple[str, str, float, int]:
    return row.trouble, row.method, row.rate, row.seed


def one(case: Case, trouble: str, method: str, rate: float, seed: int) -> Row:
    """A run from its seed: weights, batches and trouble are those of all methods."""
    task = case.make(trouble, seed)
    optimizer = "SGD" if method.startswith("SGD") else "Adam"
    chain = Chain(*METHODS[method](task), LR(rate * task.rate(optimizer)))
    run = train(task, chain, case.length(trouble))
    return Row(trouble, method, rate, seed, digits(run.final))


def best(rows: list[Row], trouble: str, method: str) -> float | None:
    """The rate with the smallest median over the seeds of tuning, once all of them are there."""
    losses: dict[float, list[float]] = {rate: [] for rate in GRID}
    for row in rows:
        if (row.trouble, row.method) == (trouble, method) and row.seed in TUNING:
            losses[row.rate].append(row.final_loss)
    if any(len(found) < len(TUNING) for found in losses.values()):
        return None
    return min(losses, key=lambda rate: statistics.median(losses[rate]))


def missing(rows: list[Row]) -> Iterator[tuple[str, str, float, int]]:
    """What has to run next: first tuning, then results seed by seed, so that any part is paired.

    `rows` may grow while this is read.
    """
    done = {key(row) for row in rows}
    pairs = [(trouble, method) for trouble in TROUBLES for method in METHODS]
    for trouble, method in pairs:
        for rate in GRID:
            for seed in TUNING:
                if (trouble, method, rate, seed) not in done:
                    yield trouble, method, rate, seed
    for seed in SEEDS:
        for trouble, method in pairs:
            rate = best(rows, trouble, method)
            if rate is not None and (trouble, method, rate, seed) not in done:
                yield trouble, method, rate, seed


def work(file: Path, text: Path, minutes: float) -> int:
    """Add runs to the file until the time is over or nothing is missing; how many there are."""
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    end = time.monotonic() + 60 * minutes
    case, rows = Case(SIZES["small"], text, torch.device("cpu")), read(file, Row)

    def made() -> Iterator[Row]:
        for wanted in missing(rows):
            if time.monotonic() > end:
                break
            rows.append(one(case, *wanted))
            yield rows[-1]

    write(file, Row, made(), more=True)
    return len(rows)
