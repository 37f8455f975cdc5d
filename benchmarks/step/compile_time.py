"""How long a chain takes to compile: cold, and with the files that an earlier process left.

python -m benchmarks.step.compile_time 161 prints the seconds for 161 tensors, in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.step.chains import COMPILED, HEADLINE, RACES
from benchmarks.step.shapes import SHAPES, Shapes
from benchmarks.step.timing import model

COUNTS = (161, 1000, 10_000)


def shapes(count: int) -> Shapes:
    return SHAPES["resnet50"]() if count == 161 else [(32, 32)] * count


def seconds(count: int) -> float:
    """The first three steps of the headline chain, less what three later ones take."""
    params, _ = model(shapes(count), False, "cpu")
    begin = time.perf_counter()
    step = RACES[HEADLINE].contestants[COMPILED](params)
    for _ in range(3):
        step()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(3):
        step()
    return first - (time.perf_counter() - begin)


def cold_and_warm(count: int) -> tuple[float, float]:
    """The seconds in two fresh processes, the second with what the first has cached."""
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (_elsewhere(count, cache) for _ in range(2))
    return cold, warm


def _elsewhere(count: int, cache: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step.compile_time", str(count)],
        env={**os.environ, "TORCHZERO_CLIP_CACHE": cache},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"compiling {count} tensors failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    torch.manual_seed(0)
    print(seconds(int(sys.argv[1])))
