"""What a step of a small model costs beside torch: python -m benchmarks.small.

Each race is a thing that one writes with torch by hand, and with this library. All take turns in
one process, on one thread, on equal parameters and gradients; a ratio is the median over rounds of
the time of one over that of torch in the same round. The machine should do nothing else. Other
libraries take part where they are installed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from benchmarks.step.bars import Bar
from benchmarks.step.chains import HEADLINE, RACES, clip_norm, installed
from benchmarks.step.shapes import SHAPES, Shapes
from torchzero_clip import LR, Adam, ClipNorm, Modular, attach, clip_grad_norm_

Step = Callable[[], object]
Build = Callable[[list[Parameter]], Step]
TORCH, DEFAULT, COMPILED = "torch", "default", "compiled"
MLP: Shapes = [(64, 32), (64,), (64, 64), (64,), (8, 64), (8,)]
PAIR: Shapes = [(64, 64), (64,)]
TURN = 2e-3  # seconds that a contestant has for itself, at least


@dataclass(frozen=True)
class Small:
    """A race: the shapes, how each contestant spells it, and what ours may take of torch."""

    shapes: Shapes
    contestants: Mapping[str, Build]
    bars: Mapping[str, float]


def by_hand(make: Callable[[list[Parameter]], torch.optim.Optimizer]) -> Build:
    """torch's clip of the global norm, then an optimizer."""

    def build(params: list[Parameter]) -> Step:
        clip, optimizer = clip_norm(params), make(params)

        def step() -> None:
            clip()
            optimizer.step()

        return step

    return build


def chain(*, compile: bool = False, adam: bool = True) -> Build:
    links = (ClipNorm(1.0, dim="global"), *((Adam(),) if adam else ()), LR(1e-3))
    return lambda params: Modular(params, *links, compile=compile).step


def attached(params: list[Parameter]) -> Step:
    optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)
    handle = attach(optimizer, ClipNorm(1.0, dim="global"))

    def step(keep: object = handle) -> None:
        optimizer.step()

    return step


def helper(params: list[Parameter]) -> Step:
    return lambda: clip_grad_norm_(params, 1.0, dim="global")


def fused_adam(params: list[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3, fused=True)


def races() -> dict[str, Small]:
    """The races by name; peers come from the chains of the larger benchmark."""
    theirs = RACES[HEADLINE].contestants
    peers = {name: theirs[name] for name in ("torchzero", "heavyball") if name in theirs}
    peers = {name: build for name, build in peers.items() if installed(name)}
    adam = {TORCH: by_hand(fused_adam), DEFAULT: chain(), COMPILED: chain(compile=True)}
    sgd = {
        TORCH: by_hand(lambda params: torch.optim.SGD(params, lr=1e-3, foreach=True)),
        DEFAULT: chain(adam=False),
        COMPILED: chain(adam=False, compile=True),
    }
    before = {
        TORCH: by_hand(lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True)),
        DEFAULT: attached,
    }
    found = {
        "MLP, clip + Adam": Small(MLP, adam | peers, {DEFAULT: 1.8, COMPILED: 0.8}),
        "ViT-tiny, clip + Adam": Small(SHAPES["vit"](), adam, {DEFAULT: 1.15, COMPILED: 0.65}),
        "ViT-tiny, clip + SGD": Small(SHAPES["vit"](), sgd, {DEFAULT: 1.15, COMPILED: 0.65}),
        "1000 of 32x32, clip + Adam": Small(
            SHAPES["tiny"](), adam | peers, {DEFAULT: 1.1, COMPILED: 0.36}
        ),
        "attach before AdamW, 12 tensors": Small(PAIR * 6, before, {DEFAULT: 1.6}),
    }
    for count, bar in ((2, None), (12, 1.5), (100, 1.0), (1000, 1.0)):
        both = {TORCH: clip_norm, DEFAULT: helper}
        bars = {} if bar is None else {DEFAULT: bar}
        found[f"clip_grad_norm_, {count} tensors"] = Small(PAIR * (count // 2), both, bars)
    return found


def parameters(shapes: Shapes) -> list[Parameter]:
    """Parameters with gradients far above the limit."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def run(
    race: Small, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The seconds of a step of every contestant, round by round."""
    steps = {name: build(parameters(race.shapes)) for name, build in race.contestants.items()}
    counts = {}
    for name, step in steps.items():
        for _ in range(5):
            step()
        counts[name] = max(1, round(TURN / timed(step, 1, clock)))
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, end = list(steps), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[TORCH]) < 7:
        random.shuffle(order)
        for name in order:
            times[name].append(timed(steps[name], counts[name], clock))
    return times


def timed(step: Step, count: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(count):
        step()
    return (clock() - begin) / count


def main(given: Sequence[str] | None = None) -> None:
    known = races()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.small", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--races", nargs="+", choices=known, default=list(known))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each race")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of this process, for a busy machine"
    )
    args = parser.parse_args(given)
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    bars = []
    print(f"{'race':<34}{'torch, µs':>10}   of that")
    for name in args.races:
        times = run(known[name], args.seconds, clock)
        base = statistics.median(times[TORCH])
        ratios = {
            who: statistics.median([a / b for a, b in zip(rows, times[TORCH], strict=True)])
            for who, rows in times.items()
            if who != TORCH
        }
        shown = ", ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items())
        print(f"{name:<34}{1e6 * base:>10.0f}   {shown}", flush=True)
        bars += [Bar(f"{name}, {who}", ratios[who], bar) for who, bar in known[name].bars.items()]
    print(*bars, sep="\n")


if __name__ == "__main__":
    main()
