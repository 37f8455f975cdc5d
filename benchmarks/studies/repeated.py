"""What compiled rules cost on a small model: python -m benchmarks.studies.repeated.

Steps of an MLP of six tensors with `compile=True`: each rule before Adam is compared with ClipNorm
before Adam. All take turns in one process, on one thread. A ratio is the median over rounds of the
time of one chain over the time of ClipNorm in the same round, with its quartiles. The machine
should do nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from benchmarks.circumstances import watched
from benchmarks.small import MLP, Build, Small, Step, run
from benchmarks.step.bars import judged, of_ratios
from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    Group,
    Guard,
    Masked,
    Modular,
    Partition,
    State,
    TensorList,
    Transform,
    ZClip,
)


class Halved(Transform):
    """A rule as a user writes one, which says that it computes from its arguments alone."""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(0.5)


def clip() -> ClipNorm:
    return ClipNorm(1.0, dim="global")


def is_matrix(_: str, p: torch.Tensor) -> bool:
    return p.dim() > 1


def form(name: str, p: torch.Tensor) -> str:
    return "matrix" if is_matrix(name, p) else "rest"


BASE = "ClipNorm"
RULES: dict[str, tuple[Callable[[], list[Transform]], float]] = {
    "Guard, ClipNorm": (lambda: [Guard(), clip()], 1.2),
    "ZClip": (lambda: [ZClip(dim="global")], 1.2),
    "ClipNormByEMA": (lambda: [ClipNormByEMA(dim="global")], 1.2),
    "AdaGC": (lambda: [AdaGC()], 1.2),
    "Masked(ClipNorm)": (lambda: [Masked(clip(), is_matrix)], 1.5),
    "Partition of two": (lambda: [Partition({"matrix": clip(), "rest": clip()}, form)], 1.5),
    "ClipNorm, a rule of a user": (lambda: [clip(), Halved()], 1.5),
}


def compiled(links: Callable[[], list[Transform]]) -> Build:
    def build(params: list[Parameter]) -> Step:
        named = [(str(i), p) for i, p in enumerate(params)]
        return Modular(named, *links(), Adam(), LR(1e-3), compile=True).step

    return build


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.studies.repeated", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    chains = {BASE: lambda: [clip()]} | {name: links for name, (links, _) in RULES.items()}
    race = Small(MLP, {name: compiled(links) for name, links in chains.items()}, {})
    with watched("benchmarks.studies.repeated", given) as watch:
        times = run(race, args.seconds)
        print(f"{f'{BASE}, Adam':<28}{1e6 * statistics.median(times[BASE]):>6.0f} µs")
        found = []
        for name, (_, most) in RULES.items():
            ratios = [a / b for a, b in zip(times[name], times[BASE], strict=True)]
            found.append(of_ratios(f"{name}, Adam", ratios, most))
        print(judged(found, watch.busy))


if __name__ == "__main__":
    main()
