"""What a step of a small model costs, compared with torch: python -m benchmarks.small.

Each race compares this library with everything that one would write with torch by hand: the fused
kernel, the operators for lists (foreach), and one tensor at a time (loop). All contestants take
turns in one process, on one thread, with equal parameters and gradients. A ratio is the median over
rounds of our time over that of torch's fastest spelling in the same round, with its quartiles. The
machine should do nothing else: if other processes take more than 5 % of the CPU time, the lines say
"busy" and decide nothing. Other libraries take part if they are installed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from benchmarks.circumstances import watched
from benchmarks.step.bars import Bar, judged, of_ratios
from benchmarks.step.chains import (
    HEADLINE,
    LOOP,
    RACES,
    Optimizer,
    clip_norm,
    clip_norm_in_a_loop,
    installed,
    spellings,
)
from benchmarks.step.shapes import SHAPES, Shapes
from benchmarks.step.timing import FEWEST, fastest_in_torch, in_torch
from torchzero_clip import LR, Adam, ClipNorm, Modular, Transform, ZClip, attach, clip_grad_norm_

Step = Callable[[], object]
Build = Callable[[list[Parameter]], Step]
DEFAULT, COMPILED = "default", "compiled"
MLP: Shapes = [(64, 32), (64,), (64, 64), (64,), (8, 64), (8,)]
PAIR: Shapes = [(64, 64), (64,)]
TURN = 2e-3  # seconds that a contestant has for itself, at least


@dataclass(frozen=True)
class Small:
    """A race.

    Args:
        shapes: The parameters.
        contestants: Each spelling, by name; those in torch begin with "torch".
        bars: The most that ours should take of the time of torch's fastest spelling; None if
            nothing is demanded.
    """

    shapes: Shapes
    contestants: Mapping[str, Build]
    bars: Mapping[str, float | None]


CLIP = ClipNorm(1.0, dim="global")


def chain(clip: Transform = CLIP, *, compile: bool = False, adam: bool = True) -> Build:
    links = (clip, *((Adam(),) if adam else ()), LR(1e-3))
    return lambda params: Modular(params, *links, compile=compile).step


def attached(params: list[Parameter]) -> Step:
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    handle = attach(optimizer, ClipNorm(1.0, dim="global"))

    def step(keep: object = handle) -> None:
        optimizer.step()

    return step


def helper(params: list[Parameter]) -> Step:
    return lambda: clip_grad_norm_(params, 1.0, dim="global")


def by_hand(kind: type[torch.optim.Optimizer]) -> dict[str, Build]:
    """Return torch's clip of the global norm before each implementation of an optimizer."""

    def make(**options: Any) -> Optimizer:
        return lambda params: kind(params, lr=1e-3, **options)

    return spellings(clip_norm, make)


def races() -> dict[str, Small]:
    """Return the races by name; peers come from the chains of the larger benchmark."""
    theirs = RACES[HEADLINE].contestants
    peers = {name: theirs[name] for name in ("torchzero", "heavyball") if name in theirs}
    peers = {name: build for name, build in peers.items() if installed(name)}
    adam = {**by_hand(torch.optim.Adam), DEFAULT: chain(), COMPILED: chain(compile=True)}
    sgd = {
        **by_hand(torch.optim.SGD),
        DEFAULT: chain(adam=False),
        COMPILED: chain(adam=False, compile=True),
    }
    z_clip = {
        **by_hand(torch.optim.Adam),
        DEFAULT: chain(ZClip()),
        COMPILED: chain(ZClip(), compile=True),
    }
    before = {**by_hand(torch.optim.AdamW), DEFAULT: attached}
    found = {
        "MLP, clip + Adam": Small(MLP, adam | peers, {DEFAULT: 1.8, COMPILED: 0.8}),
        "MLP, ZClip + Adam": Small(MLP, z_clip, {}),
        "ViT-tiny, clip + Adam": Small(SHAPES["vit"](), adam, {DEFAULT: 1.15, COMPILED: 0.65}),
        "ViT-tiny, clip + SGD": Small(SHAPES["vit"](), sgd, {DEFAULT: 1.15, COMPILED: 0.65}),
        "1000 of 32x32, clip + Adam": Small(
            SHAPES["tiny"](), adam | peers, {DEFAULT: 1.1, COMPILED: 0.36}
        ),
        "attach before AdamW, 12 tensors": Small(PAIR * 6, before, {DEFAULT: 1.6}),
    }
    for count, bar in ((2, None), (12, 1.5), (100, 1.0), (1000, 1.0)):
        both = {"torch foreach": clip_norm, LOOP: clip_norm_in_a_loop, DEFAULT: helper}
        found[f"clip_grad_norm_, {count} tensors"] = Small(
            PAIR * (count // 2), both, {DEFAULT: bar}
        )
    return found


def parameters(shapes: Shapes) -> list[Parameter]:
    """Return parameters whose gradients are far above the threshold."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def run(
    race: Small, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of a step of every contestant, round by round."""
    steps = {name: build(parameters(race.shapes)) for name, build in race.contestants.items()}
    counts = {}
    for name, step in steps.items():
        for _ in range(5):
            step()
        counts[name] = max(1, round(TURN / timed(step, 1, clock)))
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, end = list(steps), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[order[0]]) < FEWEST:
        random.shuffle(order)
        for name in order:
            times[name].append(timed(steps[name], counts[name], clock))
    return times


def timed(step: Step, count: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(count):
        step()
    return (clock() - begin) / count


def bars(name: str, race: Small, times: Mapping[str, Sequence[float]]) -> Iterator[Bar]:
    """Yield the time of each contestant over that of torch's fastest spelling."""
    best = fastest_in_torch(times)
    assert best is not None, f"the race {name!r} has no spelling in torch"
    base = f"of {best}, {1e6 * statistics.median(times[best]):.0f} µs"
    others = [who for who in times if not in_torch(who)]
    for who in others:
        ratios = [a / b for a, b in zip(times[who], times[best], strict=True)]
        yield of_ratios(f"{base}: {name}, {who}", ratios, race.bars.get(who))


def main(given: Sequence[str] | None = None) -> None:
    known = races()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.small", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--races", nargs="+", choices=known, default=list(known))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each race")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of this process, for a busy machine"
    )
    args = parser.parse_args(given)
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    with watched("benchmarks.small", given) as watch:
        found: list[Bar] = []
        for name in args.races:
            raced = list(bars(name, known[name], run(known[name], args.seconds, clock)))
            print(*raced, sep="\n", file=sys.stderr, flush=True)
            found += raced
        print(judged(found, watch.busy))


if __name__ == "__main__":
    main()
