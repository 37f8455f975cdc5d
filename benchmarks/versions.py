"""Race two versions of this library side by side: one process, their steps alternating.

    git worktree add ../before v0.1.0
    python -m benchmarks.versions ../before                       # compile=True
    python -m benchmarks.versions ../before --eager --shapes vit --chains "clip + Adam"

Each version steps the same chain on the same parameters and gradients, the two in turns that are
drawn anew in every round. A ratio is the median over rounds of the new time over the old one, with
its quartiles; below 1 is faster than before. A chain that the older version cannot read is listed.
The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.circumstances import watched
from benchmarks.step.bars import Bar, judged, of_ratios
from benchmarks.step.chains import RACES, Params, Race, Step
from benchmarks.step.shapes import SHAPES, Shapes
from benchmarks.step.timing import FEWEST, WARM_UP, model, refill, timed
from torchzero_clip import Chain

NAME = "torchzero_clip"
ROOT = Path(__file__).parents[1]
MEAN, WORST = 1.03, 1.1
CHAINS = [name for name, race in RACES.items() if race.links]


def take_modules() -> dict[str, ModuleType]:
    """The modules of the version that is imported now, which imports find no longer."""
    names = [name for name in sys.modules if name.split(".", maxsplit=1)[0] == NAME]
    return {name: sys.modules.pop(name) for name in names}


class Version:
    """One tree of the library, with modules of its own: what it imports later is found there too.

    Args:
        tree: The folder in which the package lies.
    """

    def __init__(self, tree: Path) -> None:
        self.tree = tree.resolve()
        if not (self.tree / NAME / "__init__.py").exists():
            raise SystemExit(
                f"{tree} has no {NAME}/__init__.py: give the folder of a checkout, or the one that "
                "pip install --target has filled"
            )
        self.modules: dict[str, ModuleType] = {}
        sys.path.insert(0, str(self.tree))
        try:
            with self.current():
                self.library: Any = importlib.import_module(NAME)
        finally:
            sys.path.remove(str(self.tree))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, `import torchzero_clip` means this version: functions import, too."""
        outside = take_modules()
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = take_modules()
            sys.modules.update(outside)

    def step(self, config: Any, params: Params, compile: bool) -> Step:
        """A step of a chain, given as plain data."""
        chain = self.library.Chain.from_config(config)
        step: Step = self.library.Modular(params, chain, compile=compile).step
        return step


def race(
    versions: Sequence[Version], contest: Race, shapes: Shapes, seconds: float, compile: bool
) -> list[list[float]]:
    """The seconds of each version, round by round."""
    config = json.loads(json.dumps(Chain(*contest.links).to_config()))  # which both can read
    params, fresh = model(shapes, False, "cpu", contest.dtype)
    steps: list[Step] = []
    for version in versions:
        with version.current():
            steps.append(version.step(config, params, compile))
            for _ in range(WARM_UP):
                refill(params, fresh)
                steps[-1]()
    times: list[list[float]] = [[] for _ in versions]
    order, shuffle = list(range(len(versions))), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        while len(times[0]) < FEWEST or time.perf_counter() < end:
            shuffle.shuffle(order)
            for i in order:
                refill(params, fresh)
                with versions[i].current():
                    times[i].append(timed(steps[i], "cpu"))
    finally:
        gc.enable()
    return times


def ratio(what: str, new: Sequence[float], old: Sequence[float]) -> Bar:
    """Return the new time over the old one, for one chain on some shapes."""
    return of_ratios(what, [a / b for a, b in zip(new, old, strict=True)], WORST)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", type=Path, help="the folder in which the older package lies")
    parser.add_argument("--new", type=Path, default=ROOT, help="the newer one; this tree")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2", "resnet50", "vit"])
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=CHAINS)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each chain and model")
    parser.add_argument("--eager", action="store_true", help="without compile=True")
    args = parser.parse_args(given)
    versions = [Version(args.new), Version(args.old)]
    with watched("benchmarks.versions", given) as watch:
        found: list[Bar] = []
        print(f"new over old, {'eager' if args.eager else 'compiled'}:")
        for shapes in args.shapes:
            for chain in args.chains:
                what = f"{shapes}, {chain}"
                try:
                    times = race(
                        versions, RACES[chain], SHAPES[shapes](), args.seconds, not args.eager
                    )
                except (TypeError, ValueError) as error:
                    print(f"not measured: {what}: {str(error).splitlines()[0]}", flush=True)
                    continue
                found.append(ratio(what, *times))
        means = [bar.value for bar in found if bar.value is not None]
        if means:
            what = f"the geometric mean of {len(means)}"
            found.append(Bar(what, statistics.geometric_mean(means), MEAN))
        print(judged(found, watch.busy))


if __name__ == "__main__":
    main()
