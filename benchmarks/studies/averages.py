"""What averages add to the time of a compiled step: python -m benchmarks.studies.averages

A step of 34 million parameters with the average, the same chain without it, and a copy of as many
numbers, which is 8 bytes a number at the speed that memory has at that moment, go in turns. It
prints the time of the first over that of the two others together, as median and quartiles, and
whether `ScheduleFree` stays below its bar. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.circumstances import watched
from benchmarks.step.bars import judged, of_ratios
from benchmarks.studies.state_dtype import BUSY, CHAINS, Clock, Step, clock_of, optimizer
from torchzero_clip import Lookahead, ScheduleFree, Transform, WeightAverage, WeightEMA

LINKS: dict[str, Callable[[], Transform]] = {
    "ScheduleFree": ScheduleFree,
    "WeightEMA": WeightEMA,
    "WeightAverage": WeightAverage,
    "Lookahead": Lookahead,
}
LIMIT = 1.05
WARM_UP = 4  # the first steps make state, compile, and are recorded


def added(chain: str, link: str, rounds: int, clock: Clock) -> tuple[list[float], list[float]]:
    """For each round the ratio, and the gigabytes that the copy moves in a second."""
    plain = optimizer(chain, compile=True)
    params = [p.detach() for group in plain.param_groups for p in group["params"]]
    target = [torch.empty_like(p) for p in params]
    averaging = optimizer(chain, after=[LINKS[link]()], compile=True)
    steps = averaging.step, plain.step, lambda: torch._foreach_copy_(target, params)
    times = in_turns(steps, rounds, clock)
    moved = 8e-9 * sum([p.numel() for p in params])
    ratios = [one / (other + copy) for one, other, copy in times]
    return ratios, [moved / copy for *_, copy in times]


def in_turns(steps: Sequence[Step], rounds: int, clock: Clock) -> list[list[float]]:
    """The seconds of each step in each round; who comes first changes."""
    for step in steps * WARM_UP:
        step()
    times = []
    for first in range(rounds):
        taken = [0.0] * len(steps)
        for i in range(len(steps)):
            which = (first + i) % len(steps)
            begin = clock()
            steps[which]()
            taken[which] = clock() - begin
        times.append(taken)
    return times


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chain", choices=CHAINS, nargs="+", default=list(CHAINS))
    parser.add_argument("--link", choices=LINKS, nargs="+", default=list(LINKS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cpu", action="store_true", help=BUSY)
    args = parser.parse_args(given)
    clock = clock_of(args.cpu)
    with watched("benchmarks.studies.averages", given) as watch:
        bars = []
        for chain in args.chain:
            for link in args.link:
                ratios, speeds = added(chain, link, args.rounds, clock)
                speed = f"the copy moves {statistics.median(speeds):.1f} GB a second"
                limit = LIMIT if link == "ScheduleFree" else None
                bars.append(of_ratios(f"{chain}, {link}; {speed}", ratios, limit))
        print(judged(bars, watch.busy))


if __name__ == "__main__":
    main()
