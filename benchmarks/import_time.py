"""How long `import torchzero_clip` takes after `import torch`: python -m benchmarks.import_time."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

CODE = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
import torchzero_clip
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def measure() -> list[float]:
    """Milliseconds in all, and on the processor, in a fresh process."""
    run = [sys.executable, "-c", CODE]
    done = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    return [1000 * float(x) for x in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.import_time")
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    measure()  # writes the compiled files, unless PYTHONDONTWRITEBYTECODE forbids it
    print("import torchzero_clip, after torch     least  median ms")
    kinds = zip(*[measure() for _ in range(rounds)], strict=True)
    for name, taken in zip(("in all", "on the processor"), kinds, strict=True):
        print(f"{name:<36}{min(taken):>8.1f}{statistics.median(taken):>8.1f}")


if __name__ == "__main__":
    main()
