"""The methods, their learning rates, and a file that runs are added to until all are there."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.guide.troubles import TROUBLES, Size, Trouble
from benchmarks.rows import digits, read, write
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
    Graft,
    InBasis,
    Modular,
    Momentum,
    Orthogonalize,
    Partition,
    Reset,
    Shampoo,
    SkipSpike,
    SOAPBasis,
    SpikeClip,
    StableAdam,
    Transform,
    Warmup,
    WeightDecay,
    ZClip,
    matrices_and_rest,
)

TEXT = Path(__file__).parents[2] / "examples" / "data" / "harbour.txt"
TUNING = (100, 101)  # the seeds that learning rates are chosen on
SEEDS = range(20)  # those of the results
GRID = (0.3, 1.0, 3.0)  # times the rate of the trouble, which is for no clipping
BEYOND = {0.3: 0.1, 3.0: 10.0}  # tried as well where that end of the grid is best
SIZE = Size(layers=1, context=16, batch=8)
TESTS = 5  # ten steps apart, the last at the end

LIMIT = ClipNorm(1.0, dim="global")
RULES: dict[str, tuple[Transform, ...]] = {
    "no clipping": (),
    "global 1": (LIMIT,),
    "each tensor 1": (ClipNorm(1.0),),
    "AGC": (AGC(),),
    "AdaGC": (AdaGC(),),
    "AdaGC, global": (AdaGC(dim="global"),),
    "ZClip": (ZClip(),),
    "AutoClip, 10 %": (AutoClip("percentile", 10.0, warmup=LIMIT),),
    "ClipNormByEMA": (ClipNormByEMA(),),
    "ClipNormGrowth": (ClipNormGrowth(),),
    "SkipSpike": (SkipSpike(),),
    "SkipSpike, global 1": (SkipSpike(), LIMIT),
    "global 0.3": (ClipNorm(0.3, dim="global"),),
    "global 0.1": (ClipNorm(0.1, dim="global"),),
}
NOT_EVERYWHERE = ("ClipNormGrowth", "SkipSpike", "SkipSpike, global 1", "global 0.3", "global 0.1")
SPAM = Reset(Chain(SpikeClip(5000.0, wait=20), Adam()), every=50, warmup=15, keep=("step",))
STABLE_SPAM = (AdaClip(), AdaGN(), Reset(Adam(), every=100))


MATRICES: dict[str, tuple[Transform, ...]] = {
    "Muon": (Momentum(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw")),
    "SOAP": (InBasis(SOAPBasis(), Adam((0.95, 0.95))),),
    "Shampoo": (Graft(Adam(), Shampoo()),),
}
CLIPS: dict[str, tuple[Sequence[Transform], Sequence[Transform]]] = {  # outside, inside
    "no clipping": ((), ()),
    "clip outside": ((LIMIT,), ()),
    "clip inside": ((), (LIMIT,)),
}


def in_parts(
    task: Trouble,
    direction: Sequence[Transform],
    outside: Sequence[Transform],
    inside: Sequence[Transform],
) -> Chain:
    """A method for matrices, Adam for the rest; a clip in front of both, or in front of each."""
    parts = {"matrices": Chain(*inside, *direction), "rest": Chain(*inside, Adam())}
    return Chain(*outside, Partition(parts, matrices_and_rest(task.model)))


def adamw(*rule: Transform) -> Chain:
    """What is said to make clipping unneeded, around a model with layer norms."""
    return Chain(*rule, Adam(), WeightDecay(0.1), Warmup(40))


METHODS: dict[str, Callable[[Trouble], Chain]] = {
    **{f"Adam, {name}": lambda task, r=rule: Chain(*r, Adam()) for name, rule in RULES.items()},
    "StableAdam": lambda task: Chain(StableAdam()),
    "SPAM": lambda task: Chain(SPAM),
    "Stable-SPAM": lambda task: Chain(*STABLE_SPAM),
    "AdamW with warm-up, no clipping": lambda task: adamw(),
    "AdamW with warm-up, global 1": lambda task: adamw(LIMIT),
    **{
        f"SGD, {name}": lambda task, r=RULES[name]: Chain(*r, Momentum(0.9))
        for name in ("no clipping", "global 1", "AGC")
    },
    **{
        f"{name}, {where}": lambda task, d=direction, c=clips: in_parts(task, d, *c)
        for name, direction in MATRICES.items()
        for where, clips in CLIPS.items()
    },
}
BY_MATRICES = tuple(f"{name}, {where}" for name in MATRICES for where in CLIPS)
FEW = "Muon, no clipping", "Muon, clip outside"
OTHERS = (  # for models without layer norms
    *(f"Adam, {name}" for name in RULES if name not in NOT_EVERYWHERE),
    *("AdamW with warm-up, no clipping", "AdamW with warm-up, global 1"),
    *("SGD, no clipping", "SGD, global 1"),
)
CASES: dict[str, tuple[str, ...]] = {  # the methods of each trouble, in the order of running
    "bad batches": (*METHODS,),
    "nothing wrong": (
        *(f"Adam, {name}" for name in RULES),
        *("StableAdam", "SPAM", "Stable-SPAM"),
        *("AdamW with warm-up, no clipping", "AdamW with warm-up, global 1"),
        *FEW,
    ),
    "bad batches, 600 steps": tuple(
        f"Adam, {name}" for name in ("no clipping", "global 1", "SkipSpike", "SkipSpike, global 1")
    ),
    "exploding": (*OTHERS, *FEW),
    "heavy tails": (*OTHERS, *BY_MATRICES),
}


@dataclass(frozen=True)
class Row:
    """A line of guide.csv: a run. The rate is a multiple of the trouble's own."""

    trouble: str
    method: str
    rate: float
    seed: int
    final_loss: float


def key(row: Row) -> tuple[str, str, float, int]:
    return row.trouble, row.method, row.rate, row.seed


def one(trouble: str, method: str, rate: float, seed: int, steps: int | None = None) -> Row:
    """A run from its seed: weights, batches and trouble are those of all methods."""
    torch.manual_seed(seed)
    task = TROUBLES[trouble](SIZE, TEXT, seed)
    lr = rate * task.rates["SGD" if method.startswith("SGD") else "Adam"]
    opt = Modular(task.model.named_parameters(), *METHODS[method](task), LR(lr))
    return Row(trouble, method, rate, seed, digits(train(task, opt, steps or task.steps)))


def train(task: Trouble, opt: Modular, steps: int) -> float:
    """The median of the last tests; infinite where that is far worse than guessing."""
    tests = []
    for left in reversed(range(steps)):
        loss, clean = task.losses()
        if not math.isfinite(clean.item()):
            return math.inf
        opt.zero_grad()
        loss.backward()
        opt.report(loss=loss)
        opt.step()
        if left % 10 == 0 and left < 10 * TESTS:
            tests.append(task.test().item())
    final = statistics.median(tests) if all(map(math.isfinite, tests)) else math.inf
    return final if final <= 2 * task.chance else math.inf


def tuning(rows: Sequence[Row], trouble: str, method: str) -> dict[float, tuple[float, ...]]:
    """The losses of the seeds of tuning, for each rate that all of them have run."""
    losses: dict[float, dict[int, float]] = {}
    for row in rows:
        if (row.trouble, row.method) == (trouble, method) and row.seed in TUNING:
            losses.setdefault(row.rate, {})[row.seed] = row.final_loss
    return {
        rate: tuple(found[seed] for seed in TUNING)
        for rate, found in losses.items()
        if len(found) == len(TUNING)
    }


def tuned(rows: Sequence[Row], trouble: str, method: str) -> dict[float, float]:
    """The mean loss of each rate."""
    return {rate: statistics.mean(x) for rate, x in tuning(rows, trouble, method).items()}


def beyond(means: dict[float, float]) -> tuple[float, ...]:
    """What is tuned as well, once the grid is."""
    end = min(GRID, key=means.__getitem__) if means.keys() >= {*GRID} else None
    return (BEYOND[end],) if end in BEYOND else ()


def best(rows: Sequence[Row], trouble: str, method: str) -> float | None:
    """The rate with the smallest mean loss, once all that has to be tuned is there."""
    means = tuned(rows, trouble, method)
    wanted = (*GRID, *beyond(means))
    return min(wanted, key=means.__getitem__) if means.keys() >= {*wanted} else None


def missing(rows: Sequence[Row]) -> Iterator[tuple[str, str, float, int]]:
    """What has to run next: the tuning of a trouble, then its results seed by seed, so that any
    part is of pairs.

    `rows` may grow while this is read.
    """
    done = {key(row) for row in rows}
    for trouble, methods in CASES.items():
        wanted: Iterator[tuple[str, str, float, int]]
        wanted = ((trouble, method, *x) for method in methods for x in product(GRID, TUNING))
        yield from (x for x in wanted if x not in done)
        for method in methods:
            outer = beyond(tuned(rows, trouble, method))
            wanted = ((trouble, method, *x) for x in product(outer, TUNING))
            yield from (x for x in wanted if x not in done)
        rates = {method: best(rows, trouble, method) for method in methods}
        wanted = ((trouble, method, rates[method], seed) for seed in SEEDS for method in methods)
        yield from (x for x in wanted if x not in done)


def work(file: Path, minutes: float) -> int:
    """Add runs to the file until the time is over or nothing is missing; how many there are."""
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    end, rows = time.monotonic() + 60 * minutes, read(file, Row)

    def made() -> Iterator[Row]:
        for wanted in missing(rows):
            if time.monotonic() > end:
                break
            rows.append(one(*wanted))
            yield rows[-1]

    write(file, Row, made(), more=True)
    return len(rows)
