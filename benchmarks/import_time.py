"""How long `import torchzero_clip` takes after `import torch`: python -m benchmarks.import_time.

From compiled files, as an installed package has them, whatever the environment says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.circumstances import watched

CODE = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
import torchzero_clip
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def measure(cache: str) -> list[float]:
    """Milliseconds in all, and on the processor, in a fresh process."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**kept, "PYTHONPYCACHEPREFIX": cache},
    )
    return [1000 * float(x) for x in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.import_time")
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as cache:
        measure(cache)  # compiles
        rows = [measure(cache) for _ in range(rounds)]
    print("import torchzero_clip, after torch     least   median ms (quartiles)")
    for name, taken in zip(("in all", "on the processor"), zip(*rows, strict=True), strict=True):
        low, middle, high = statistics.quantiles(taken, n=4)
        print(f"{name:<36}{min(taken):>8.1f}{middle:>12.1f} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    with watched("benchmarks.import_time"):
        main()
