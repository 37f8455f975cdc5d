"""Measure norms: their time compared with torch's, and their error.

    python -m benchmarks.norms [--seconds 3]

The time is divided by the time of `torch._foreach_norm` of order 2 for the same shapes in float32,
in turns. The error is relative to float64. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.circumstances import watched
from benchmarks.step.bars import Bar, judged, of_ratios
from torchzero_clip.core import norms

SIZES: dict[str, Callable[[], list[int]]] = {
    "1000 of 1K": lambda: [1024] * 1000,
    "150 mixed": lambda: [(256, 768, 3072, 147_456, 589_824)[i % 5] for i in range(150)],
    "one of 38.6M": lambda: [38_597_376],
}
SMALL: dict[str, Callable[[], list[int]]] = {"3 mixed": lambda: [10, 5000, 70_000]}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BARS = {
    (2, F32): 1.0,
    (math.inf, F32): 1.0,
    (1, F32): 2.0,
    (2, BF16): 2.5,
    (2, F16): 2.5,
}
RANGES = {  # scales of the entries; the last ones are denormal
    F32: [1.0, 1e20, 1e-30, 1e-40],
    BF16: [1.0, 1e20, 1e-30, 1e-39],
    F16: [1.0, 1e4, 1e-4, 1e-6],
}
RIGHT = 1e-6
FEWEST = 5


def ours(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The norm of each tensor, in float64."""
    return norms.statistics(tensors, norms.measure(order))[0]


def exact(tensors: Sequence[Tensor], order: float) -> Tensor:
    """The same by its definition, in float64, of entries that are at most 1."""
    out = []
    for t in tensors:
        wide = t.double()
        peak = wide.abs().max()
        out.append(torch.linalg.vector_norm(wide / peak, order) * peak if peak > 0 else peak)
    return torch.stack(out)


def draw(sizes: Sequence[int], dtype: torch.dtype, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64
    return [(scale * torch.randn(n, generator=generator, dtype=wide)).to(dtype) for n in sizes]


def error(sizes: Sequence[int], order: float, dtype: torch.dtype) -> float:
    """The largest relative error of a norm, over all ranges."""
    worst = 0.0
    for scale in RANGES[dtype]:
        tensors = draw(sizes, dtype, scale)
        right = exact(tensors, order)
        away = ((ours(tensors, order) - right).abs() / right).max().item()
        worst = away if math.isnan(away) else max(worst, away)
    return worst


def ratio(sizes: Sequence[int], order: float, dtype: torch.dtype, seconds: float) -> list[float]:
    """Ours over torch's order 2 in float32, round by round."""
    mine, theirs = draw(sizes, dtype, 1.0), draw(sizes, F32, 1.0)
    calls = [lambda: ours(mine, order), lambda: torch.stack(torch._foreach_norm(theirs))]
    found: list[float] = []
    shuffle, end = random.Random(0), time.perf_counter() + seconds
    for call in calls:
        call()
    while len(found) < FEWEST or time.perf_counter() < end:
        times = [0.0, 0.0]
        for i in shuffle.sample([0, 1], 2):
            start = time.perf_counter()
            calls[i]()
            times[i] = time.perf_counter() - start
        found.append(times[0] / times[1])
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.norms", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kind and size")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small")
    args = parser.parse_args(given)
    seconds = 0.0 if args.quick else args.seconds
    with watched("benchmarks.norms", given) as watch:
        times: list[Bar] = []
        errors: list[Bar] = []
        for name, sizes in (SMALL if args.quick else SIZES).items():
            for (order, dtype), limit in BARS.items():
                what = f"{name}, order {order}, {str(dtype).removeprefix('torch.')}"
                ratios = ratio(sizes(), order, dtype, seconds)
                times.append(of_ratios(f"time: {what}", ratios, limit))
                away = error(sizes(), order, dtype)
                errors.append(Bar(f"millionths of error: {what}", away / RIGHT, 1.0))
        print(judged(times, watch.busy))
        print(judged(errors, busy=False))


if __name__ == "__main__":
    main()
