"""How the time of a step grows with the number of tensors: python -m benchmarks.studies.overhead.

Tiny tensors, so that what is timed is the work around the kernels. The chain is a global clip, Adam
and a learning rate; beside it torch's clip and fused Adam. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.step.bars import Bar
from benchmarks.step.chains import HEADLINE, OURS, RACES, Race
from benchmarks.step.timing import run

COUNTS = (10, 100, 1000, 10_000)
NUMBERS = 16  # in each tensor
BAR = 1.2


def measure(counts: Sequence[int], seconds: float) -> dict[int, dict[str, float]]:
    """Microseconds a step for each contestant, by the number of tensors."""
    both = {name: RACES[HEADLINE].contestants[name] for name in (OURS, "torch fused")}
    out = {}
    for count in counts:
        times, _ = run(Race(both, 8), [(NUMBERS,)] * count, False, seconds, "cpu")
        out[count] = {name: 1e6 * statistics.median(t) for name, t in times.items()}
    return out


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.studies.overhead", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of tensors")
    args = parser.parse_args(given)
    found = measure(args.counts, args.seconds)
    print(f"{'tensors':>8}{'ms a step':>12}{'µs a tensor':>13}{'torch':>9}{'ours / torch':>14}")
    for count, times in found.items():
        mine, theirs = times.values()
        row = f"{count:>8}{mine / 1000:>12.2f}{mine / count:>13.2f}{theirs / count:>9.2f}"
        print(f"{row}{mine / theirs:>14.2f}")
    each = {count: times[OURS] / count for count, times in found.items()}
    growth = each[10_000] / each[1000] if {1000, 10_000} <= each.keys() else None
    print(Bar("time a tensor of 10,000 tensors over that of 1000", growth, BAR))


if __name__ == "__main__":
    main()
