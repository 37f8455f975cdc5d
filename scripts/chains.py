"""Random chains as files: each does the same steps as its chain, or is refused with a SourceError.

    python scripts/chains.py --chains 2000
    python scripts/chains.py --seconds 60
    python scripts/chains.py --seed 17 --chains 1   # one of them again

A seed makes a chain of any classes of the contract table, alone and inside others, and a run of
it: two groups with values of their own, gradients that are missing, zero or a spike, live values
that change in every step, and steps past every period of the table. The chain and its file go
side by side, weights for evaluation included, and half-way each takes the other's state dict. What
neither agrees nor is refused is printed as the smallest part of the chain that still shows it, and
is the exit status.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from examples.write_your_own import ClipToAverage, SlowBoost  # noqa: E402
from tests.helpers import SHAPES, gradients, saved  # noqa: E402
from tests.table import GOOD  # noqa: E402
from torchzero_clip import (  # noqa: E402
    LR,
    Chain,
    Graft,
    Identity,
    Lookahead,
    Masked,
    Modular,
    Parallel,
    Partition,
    QKClip,
    Reset,
    ScheduleFree,
    TensorList,
    Transform,
    WeightAverage,
    WeightEMA,
    When,
)
from torchzero_clip.published import NAMES  # noqa: E402
from torchzero_clip.source import SourceError  # noqa: E402

FILE = "written.py"
STEPS = 30
ALIKE = {torch.float32: 1e-5, torch.float64: 1e-10}  # of the largest entry
NOISE = {torch.float32: 2.0**-22, torch.float64: 2.0**-51}  # of the gradients of the noisy run
SLACK = 300  # how much further than the noisy run a file may be
LOST = 1e-3  # a chain that noise takes this far away says nothing any more

WRITABLE = ("clipping", "descent", "adaptive")
KINDS: dict[type, list[Callable[[], Transform]]] = {}
MATRICES = {case.cls for case in GOOD if case.matrices}
for case in GOOD:
    KINDS.setdefault(case.cls, []).append(case.make)
KINDS |= {
    SlowBoost: [SlowBoost],
    ClipToAverage: [ClipToAverage, lambda: ClipToAverage(dim="layer")],
}
COMMON = [cls for cls in KINDS if {*cls.__module__.split(".")} & {*WRITABLE, "examples"}]


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() >= 2


def is_embedding(name: str, p: Tensor) -> bool:
    return name.startswith("embed")


def label(name: str, p: Tensor) -> str:
    return "matrix" if is_matrix(name, p) else "other"


def early(step: int) -> bool:
    return step <= 4


def total(u: dict[str, TensorList]) -> TensorList:
    first, *others = u.values()
    for other in others:
        first.add_(other)
    return first


def some(rng: random.Random, most: int) -> list[Transform]:
    """One to so many rules, some inside others."""
    return [wrapped(rng, rule(rng)) for _ in range(rng.randint(1, most))]


def rule(rng: random.Random) -> Transform:
    """A construction of any class, more often of those that a file can say."""
    cls = rng.choice(COMMON if rng.random() < 0.92 else list(KINDS))
    return rng.choice(KINDS[cls])()


def wrapped(rng: random.Random, inner: Transform) -> Transform:
    """The rule, or one that has it inside."""
    if rng.random() < 0.75:
        return inner
    if rng.random() < 0.4:
        inner = Chain(inner, rule(rng), name=rng.choice([None, "part"]))
    ways: list[Callable[[], Transform]] = [
        lambda: Masked(inner, rng.choice([is_matrix, is_embedding])),
        lambda: Partition({"matrix": inner, "other": rule(rng)}, label),
        lambda: Chain(inner, name="chain"),
        lambda: When(early, inner),
        lambda: Reset(inner, 5, 2),
        lambda: Graft(inner, Identity()),
        lambda: Parallel({"a": inner, "b": Identity()}, total),
    ]
    way = rng.choices(ways, weights=[5, 5, 3, 1, 1, 1, 1])[0]
    try:
        return way()
    except ValueError:  # a rule that may not stand inside
        return inner


def links_of(seed: int) -> list[Transform]:
    """The links of the chain of a seed."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        links: list[Transform] = [NAMES[rng.choice(sorted(NAMES))](), *some(rng, 2)]
        rng.shuffle(links)
    else:
        links = some(rng, 4)
    if not any("lr" in inner.live for link in links for inner in link.walk()):
        links.insert(rng.randint(len(links) // 2, len(links)), LR(0.05))
    return links + averages(random.Random(f"averages {seed}"), links)


def averages(rng: random.Random, links: Sequence[Transform]) -> list[Transform]:
    """Averages of weights, behind two chains of five: one that may change the step, and others."""
    if rng.random() > 0.4:
        return []
    owners = [inner for link in links for inner in link.walk() if "lr" in inner.live]
    changing = [Lookahead(2), Lookahead(3, 0.8, start="sync"), ScheduleFree(0.5, r=1.0)]
    passing = [WeightEMA(0.5), WeightEMA(0.9, every=2, warmup=True), WeightAverage(2, every=3)]
    first = rng.choice([None, *changing[: 3 if len(owners) == 1 else 2]])
    made = ([] if first is None else [first]) + rng.sample(passing, rng.randint(first is None, 2))
    return [Masked(one, is_matrix) if rng.random() < 0.2 else one for one in made]


# ---------------------------------------------------------------------- a run of a chain


@dataclass
class Step:
    """The gradients of a step, and the live values of each group."""

    grads: dict[str, Tensor | None]
    values: list[dict[str, Any]]


@dataclass
class Run:
    """What a chain and its file are given."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    own: dict[str, Any]
    steps: list[Step]
    swapped: int

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        drawn = gradients(self.shapes, 99, self.dtype)
        return {name: torch.nn.Parameter(t) for name, t in drawn.items()}

    def groups(self, params: dict[str, Any]) -> list[dict[str, Any]]:
        """The parameters in two groups, which share a layer."""
        rows = list(params.items())
        return [{"params": rows[:3]}, {"params": rows[3:], **self.own}]


def run_of(seed: int, links: Sequence[Transform]) -> Run:
    """Everything that happens to a chain, from its seed."""
    rng = random.Random(f"run {seed}")
    shapes: dict[str, tuple[int, ...]] = {**SHAPES, "last.weight": (5, 4)}
    inner = [type(one) for link in links for one in link.walk()]
    if not MATRICES.isdisjoint(inner):
        shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    elif rng.random() < 0.1:
        shapes["embed.empty"] = (0, 3)
    dtype = torch.float32 if rng.random() < 0.25 else torch.float64
    choices = values_of(Modular([("a.weight", torch.zeros(2, 2))], *links))
    own = {key: rng.choice(row) for key, row in choices.items() if rng.random() < 0.5}
    steps = []
    now = [{key: row[0] for key, row in choices.items()} | given for given in ({}, own)]
    alike = rng.random() < 0.3
    if alike:
        own.clear()
    for step in range(STEPS):
        for group in now:
            changed = {key: rng.choice(row) for key, row in choices.items() if rng.random() < 0.3}
            group.update(changed)
        now = [now[0], dict(now[0])] if alike else now
        scale = rng.choice([1, 1, 1, 0.1, 10, 300])
        grads: dict[str, Tensor | None] = {**gradients(shapes, step, dtype, scale)}
        for name in grads:
            if rng.random() < 0.15:
                grads[name] = None
            elif rng.random() < 0.03:
                grads[name] = torch.zeros(shapes[name], dtype=dtype)
        without = {1: list(shapes)[:3], 2: list(shapes)[3:], 3: list(shapes)}
        for name in without.get(rng.randrange(20), []):
            grads[name] = None
        steps.append(Step(grads, [dict(group) for group in now]))
    return Run(shapes, dtype, own, steps, rng.choice([STEPS // 2, -1]))


def values_of(opt: Modular) -> dict[str, list[Any]]:
    """What each live value may be: its own first, then others that the rule takes."""
    found: dict[str, list[Any]] = {}
    for link in [inner for top in opt.links for inner in top.walk()]:
        for name, key in link.keys.items():
            value = opt.defaults[key]
            found[key] = [value]
            for factor in (0.5, 0.9, 1.1, 2.0):
                try:
                    link.transform.with_values({name: times(value, factor)})
                except ValueError:
                    continue
                found[key].append(times(value, factor))
    return found


def times(value: Any, factor: float) -> Any:
    """A value as much larger, in its kind."""
    if isinstance(value, (tuple, list)):
        return tuple([times(x, factor) for x in value])
    if value is None or isinstance(value, bool):
        return value
    return max(round(value * factor), 1) if isinstance(value, int) else value * factor


# ---------------------------------------------------------------------- side by side


class Apart(Exception):
    """A file that does other steps than its chain."""


def written(text: str) -> Any:
    """The class that a file defines."""
    module = types.ModuleType("written")
    exec(compile(text, FILE, "exec"), vars(module))
    return vars(module)["MyOptimizer"]


def compare(seed: int, links: Sequence[Transform]) -> int:
    """Follow a chain and its file; how many steps say something."""
    run = run_of(seed, links)
    ours, noisy, theirs = run.parameters(), run.parameters(), run.parameters()

    def library(params: Any) -> Modular:
        return Modular(run.groups(params), *links, fused=False)

    a, twin = library(ours), library(noisy)
    cls = written(a.to_source())
    asked = [one.max_logits for link in links for one in link.walk() if isinstance(one, QKClip)]
    given = {"max_logits": asked[0]} if asked else {}
    b = cls(run.groups(theirs), **given)
    bits = torch.Generator().manual_seed(seed)
    for number, step in enumerate(run.steps):
        if number == run.swapped:
            states = saved(a.state_dict()), saved(b.state_dict())
            a, b = library(ours), cls(run.groups(theirs), **given)
            a.load_state_dict(states[1]), b.load_state_dict(states[0])
        for opt, params in ((a, ours), (twin, noisy), (b, theirs)):
            for group, values in zip(opt.param_groups, step.values, strict=True):
                group.update(values)
            for name, p in params.items():
                g = step.grads[name]
                p.grad = None if g is None else g.clone()
                if g is not None and params is noisy:
                    p.grad *= 1 + NOISE[run.dtype] * torch.randn(p.shape, generator=bits)
            opt.step()
        sides = [{"param": row, "grad": _grads(row)} for row in (ours, noisy, theirs)]
        if hasattr(b, "averaged_weights"):
            for opt, params, side in zip((a, twin), (ours, noisy), sides, strict=False):
                with opt.averaged():
                    side["average"] = {name: p.detach().clone() for name, p in params.items()}
            sides[2]["average"] = {name: b.averaged_weights(p) for name, p in theirs.items()}
        for kind, row in sides[0].items():
            noise, away = distance(row, sides[1][kind]), distance(row, sides[2][kind])
            if not noise < LOST:
                return number
            if not away <= ALIKE[run.dtype] + SLACK * noise:
                raise Apart(f"step {number}: {kind}s are {away:.2g} apart, noise {noise:.2g}")
    return STEPS


def _grads(params: dict[str, Any]) -> dict[str, Any]:
    return {name: p.grad for name, p in params.items()}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between tensors, of the largest entry."""
    far = 0.0
    for name, x in a.items():
        if x is not None and x.numel():
            gap = (x - b[name]).abs().max().item() / max(x.abs().max().item(), 1.0)
            far = max(far, gap) if gap == gap else float("inf")
    return far


# ---------------------------------------------------------------------- many


def outcome(seed: int, links: Sequence[Transform]) -> tuple[str, str]:
    """What came of a chain: "equal", "refused", "no chain", or "wrong" and why."""
    try:
        Modular([("a.weight", torch.zeros(2, 2))], *links)
    except ValueError as error:
        return "no chain", str(error)
    try:
        return "equal", str(compare(seed, links))
    except SourceError as error:
        return "refused", str(error)
    except Apart as error:
        return "wrong", str(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError) and last.filename == FILE:  # a sentence of the file
            return "refused in a step", str(error)
        return "wrong", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def smaller(seed: int, links: list[Transform]) -> list[Transform]:
    """The smallest part of a chain that is still wrong."""
    for i in range(len(links)):
        rest = [*links[:i], *links[i + 1 :]]
        if rest and outcome(seed, rest)[0] == "wrong":
            return smaller(seed, rest)
    return links


def seeds(first: int, chains: int | None, seconds: float | None) -> Iterator[int]:
    """Seeds, until there have been so many or the time is over."""
    start, seed = time.monotonic(), first
    while chains is None or seed < first + chains:
        if seconds is not None and time.monotonic() - start > seconds:
            return
        yield seed
        seed += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, help="stop after so many")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    asked = parser.parse_args(arguments)
    if asked.chains is None and asked.seconds is None:
        asked.chains = 2000
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counted: Counter[str] = Counter()
    for seed in seeds(asked.seed, asked.chains, asked.seconds):
        links = links_of(seed)
        found, why = outcome(seed, links)
        counted[found] += 1
        if asked.chains == 1:
            print(f"{Chain(*links)}\n{found}: {why}")
        if found == "wrong":
            links = smaller(seed, links)
            print(f"seed {seed}: {Chain(*links)}\n    {outcome(seed, links)[1]}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counted.most_common()))
    if asked.chains != 1 and counted["equal"] < sum(counted.values()) / 2:
        print("fewer than half of the chains are written: what is refused says nothing")
        return 1
    return counted["wrong"]


if __name__ == "__main__":
    sys.exit(bool(main()))
