"""The rules, a run of one, and the files that hold what came of many."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.which_rule.troubles import SAME, TROUBLES, Size, Trouble
from torchzero_clip import Chain, Modular

NEVER = {"number": "inf"}
RULES: dict[str, dict[str, Any]] = {
    "no clipping": {"type": "ClipNorm", "max_norm": NEVER, "dim": "global"},  # measures, no more
    "global norm 0.1": {"type": "ClipNorm", "max_norm": 0.1, "dim": "global"},
    "global norm 1": {"type": "ClipNorm", "max_norm": 1.0, "dim": "global"},
    "global norm 10": {"type": "ClipNorm", "max_norm": 10.0, "dim": "global"},
    "global norm, median": {"type": "ClipNorm", "max_norm": "q50", "dim": "global"},
    "per tensor 1": {"type": "ClipNorm", "max_norm": 1.0},
    "AGC": {"type": "AGC"},
    "AdaGC": {"type": "AdaGC"},
    "ZClip": {"type": "ZClip", "max_norm": None},
    "ZClip, at most 1": {"type": "ZClip"},
    "AutoClip": {"type": "AutoClip"},
    "AutoClip, 10 %": {"type": "AutoClip", "mode": "percentile", "percentile": 10.0},
    "AutoClip, 10 %, warmed": {
        "type": "AutoClip",
        "mode": "percentile",
        "percentile": 10.0,
        "warmup": {"type": "ClipNorm", "max_norm": 1.0, "dim": "global"},
    },
    "ClipNormByEMA": {"type": "ClipNormByEMA"},
    "ClipNormGrowth": {"type": "ClipNormGrowth"},
}
NONE, CALM = "no clipping", "no trouble"  # CALM: no clipping where nothing is wrong
OPTIMIZERS: dict[str, list[Any]] = {
    "Adam": ["Adam"],
    "SGD": [{"type": "Momentum", "momentum": 0.9}],
}
GRIDS = {"Adam": (0.001, 0.003, 0.01, 0.03), "SGD": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)}

REHEARSAL = 100  # the seed that learning rates and recorded norms come from; no result is of it
RECORDED = 200  # the steps of it that "q50" is the median of


def spike_score(losses: Sequence[float], window: int, deviations: float = 10.0) -> float:
    """The percentage of values ten or more standard deviations from the mean of those before.

    "Before" are the last `window` values, without the value that is judged: a value that belongs
    to its own window of n cannot be further from the mean than √(n - 1) deviations. The first
    `window` values are not judged. A value that is not finite is a spike.
    """
    values = torch.tensor(losses, dtype=torch.float64)
    if len(values) <= window:
        return 0.0
    before, judged = values.unfold(0, window, 1)[:-1], values[window:]
    distance = (judged - before.mean(1)).abs()
    spikes = (distance >= deviations * before.std(1, correction=0)) & (distance > 0)
    return 100 * (spikes | ~judged.isfinite()).double().mean().item()


@dataclass
class Case:
    """What to run on: all but the trouble, the optimizer, the rule and the seed."""

    size: Size
    text: Path
    device: torch.device
    steps: int | None = None  # instead of the size's

    def make(self, trouble: str, seed: int, calm: bool = False) -> Trouble:
        torch.manual_seed(seed)
        return TROUBLES[trouble](self.size, self.text, self.device, seed, calm)

    def length(self, trouble: str) -> int:
        return self.steps or self.size.steps * TROUBLES[trouble].longer


@dataclass
class Run:
    """What came of a run. The losses are free of the trouble."""

    losses: list[float]
    tests: list[float]
    norms: list[float]
    clipped: float
    chance: float

    @property
    def final(self) -> float:
        """The median of the last five tests; infinite where that is far worse than guessing."""
        last = self.tests[-5:]
        final = statistics.median(last) if all(map(math.isfinite, last)) else math.inf
        return final if final <= 2 * self.chance else math.inf


def train(task: Trouble, chain: Chain, steps: int) -> Run:
    opt = Modular(task.model.named_parameters(), chain)
    losses, norms, tests, every = [], [], [], max(steps // 40, 1)
    clipped = torch.zeros((), device=task.device)
    for step in range(1, steps + 1):
        loss, clean = task.losses()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(clean)
        measured = {name.split("/")[-1]: value for name, value in opt.metrics().items()}
        clipped += measured["clipped"].float().mean()
        norms.append(measured["norm"].square().sum().sqrt())
        if step % every == 0 or step == steps:
            tests.append(task.test().item())
            if not math.isfinite(tests[-1]):
                break
    share = clipped.item() / len(losses)
    return Run(torch.stack(losses).tolist(), tests, torch.stack(norms).tolist(), share, task.chance)


def chain_of(rule: dict[str, Any], optimizer: str, rate: float) -> Chain:
    return Chain.from_config([rule, *OPTIMIZERS[optimizer], {"type": "LR", "lr": rate}])


@dataclass
class Row:
    """A line of which_rule.csv."""

    trouble: str
    optimizer: str
    rule: str
    seed: int
    final_loss: float
    spike_score: float
    worst_loss: float
    clipped: float
    diverged: int
    chain: str


@dataclass
class Norms:
    """A line of which_rule_norms.csv: norms before a limit of 1, over the first steps."""

    trouble: str
    optimizer: str
    steps: int
    q10: float
    q50: float
    q90: float
    q99: float
    largest: float


@dataclass
class Rate:
    """A line of which_rule_rates.csv: a run without clipping and trouble."""

    trouble: str
    optimizer: str
    lr: float
    final_loss: float


def digits(value: float) -> float:
    """Six digits: what the files hold is what is computed with."""
    return float(f"{value:.6g}")


def sweep(case: Case, troubles: Iterable[str]) -> Iterable[Rate]:
    """What the learning rates of the troubles were chosen from."""
    for trouble in troubles:
        if trouble in SAME - {"nothing wrong"}:
            continue
        for optimizer, grid in GRIDS.items():
            for rate in grid:
                task = case.make(trouble, REHEARSAL, calm=True)
                chain = chain_of(RULES[NONE], optimizer, case.size.rate * rate)
                run = train(task, chain, case.length(trouble))
                yield Rate(trouble, optimizer, rate, digits(run.final))


def record(case: Case, trouble: str, optimizer: str) -> Norms:
    """The norms of the first steps, as a limit of 1 finds them: without one a run may blow up."""
    task = case.make(trouble, REHEARSAL)
    chain = chain_of(RULES["global norm 1"], optimizer, task.rate(optimizer))
    seen = train(task, chain, min(RECORDED, case.length(trouble))).norms
    norms = torch.tensor([norm for norm in seen if math.isfinite(norm)], dtype=torch.float64)
    at = norms.quantile(torch.tensor([0.1, 0.5, 0.9, 0.99, 1.0], dtype=torch.float64)).tolist()
    return Norms(trouble, optimizer, len(norms), *map(digits, at))


def one(case: Case, trouble: str, optimizer: str, rule: str, seed: int, norms: Norms) -> Row:
    task = case.make(trouble, seed, calm=rule == CALM)
    config = dict(RULES[NONE if rule == CALM else rule])
    if isinstance(config.get("max_norm"), str):
        config["max_norm"] = getattr(norms, config["max_norm"])
    chain = chain_of(config, optimizer, digits(task.rate(optimizer)))
    run = train(task, chain, case.length(trouble))
    settled = run.losses[case.size.window :]
    worst = max([x if math.isfinite(x) else math.inf for x in settled], default=math.inf)
    return Row(
        trouble, optimizer, rule, seed,
        final_loss=digits(run.final),
        spike_score=digits(spike_score(run.losses, case.size.window)),
        worst_loss=digits(worst),
        clipped=digits(run.clipped),
        diverged=int(math.isinf(run.final)),
        chain=json.dumps(chain.to_config()),
    )  # fmt: skip


def write(file: Path, rows: Iterable[Any]) -> list[Any]:
    """Lines as they come, so that an interrupted run leaves what it has."""
    done: list[Any] = []
    with file.open("w", newline="") as out:
        for row in rows:
            lines = csv.DictWriter(out, list(asdict(row)), lineterminator="\n")
            if not done:
                lines.writeheader()
            lines.writerow(asdict(row))
            out.flush()
            done.append(row)
            print(", ".join(str(value) for value in asdict(row).values()), flush=True)
    return done


def read(file: Path, kind: type[Any]) -> list[Any]:
    types = {"int": int, "float": float, "str": str}
    with file.open(newline="") as lines:
        return [
            kind(**{key: types[kind.__annotations__[key]](text) for key, text in line.items()})
            for line in csv.DictReader(lines)
        ]


def runs(
    case: Case, troubles: list[str], rules: list[str], seeds: int, norms: list[Norms]
) -> Iterable[Row]:
    recorded = {(n.trouble, n.optimizer): n for n in norms}
    for trouble in troubles:
        for optimizer in OPTIMIZERS:
            for rule in rules:
                if rule == CALM and trouble in SAME:
                    continue
                for seed in range(seeds):
                    yield one(case, trouble, optimizer, rule, seed, recorded[trouble, optimizer])
