"""The race of `make demo` over several seeds, at the demo's learning rate and at a tenth of it.

    python -m benchmarks.studies.race --minutes 60    # resumes after the last run
    python -m benchmarks.studies.race --table         # what the pages show

Each of the demo's six chains trains its model for 1000 steps, from the same weights and on the same
batches as the other chains of its seed. A run's loss is the median of its last five tests on
held-out text, ten steps apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.rows import digits, read, write

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # the parts of the demo import each other from there

from race.chains import CHAINS, make, parse  # noqa: E402
from race.data import Data  # noqa: E402
from race.training import Racer  # noqa: E402

FILE = ROOT / "benchmarks" / "results" / "race_seeds.csv"
STEPS, TESTS, APART = 1000, 5, 10
SEEDS = (0, 1, 2)
DEMO, LOWER = 5e-3, 5e-4
RATES = (DEMO, LOWER)
COLUMNS = {DEMO: "`LR(5e-3)`", LOWER: "`LR(5e-4)`"}


@dataclass
class Row:
    """What came of a run."""

    chain: str
    rate: float
    seed: int
    loss: float


def chain_text(name: str, rate: float) -> str:
    """Return a chain of the demo with another learning rate."""
    return CHAINS[name].replace("LR(5e-3)", f"LR({rate})")


def one(name: str, rate: float, seed: int, steps: int = STEPS) -> Row:
    """Train a model as the demo does."""
    text = chain_text(name, rate)
    data = Data(torch.device("cpu"), seed)
    racer = Racer(name, make(parse(text)[1], text), data, seed, steps)
    tested = [steps - APART * i for i in range(TESTS)]
    for step in range(1, steps + 1):
        racer.train(data.batch(step))
        if step in tested:
            racer.test(step)
    return Row(name, rate, seed, digits(statistics.median(racer.test_losses.values())))


def missing(rows: Sequence[Row], seeds: Sequence[int] = SEEDS) -> Iterator[tuple[str, float, int]]:
    """Yield the runs that are not in the file, seed by seed."""
    done = {(row.chain, row.rate, row.seed) for row in rows}
    for seed in seeds:
        for rate in RATES:
            for name in CHAINS:
                if (name, rate, seed) not in done:
                    yield name, rate, seed


def losses(rows: Sequence[Row], name: str, rate: float) -> list[float]:
    """Return the losses of a chain, one for each seed."""
    return [row.loss for row in rows if (row.chain, row.rate) == (name, rate)]


def told(rows: Sequence[Row], name: str, rate: float) -> str:
    """Return the median of the seeds, and the least and the most."""
    found = losses(rows, name, rate)
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def table(rows: Sequence[Row]) -> str:
    """Return a row for each chain and a column for each learning rate."""
    heads = " | ".join(COLUMNS[rate] for rate in RATES)
    lines = [f"| chain | before `LR` | {heads} |", "|---|---|" + "--:|" * len(RATES)]
    for name, text in CHAINS.items():
        cells = " | ".join(told(rows, name, rate) for rate in RATES)
        lines.append(f"| {name} | `{text.removesuffix(', LR(5e-3)')}` | {cells} |")
    return "\n".join(lines)


def results() -> list[Row]:
    rows: list[Row] = read(FILE, Row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--table", action="store_true", help="print what the pages show")
    given = parser.parse_args()
    if given.table:
        print(table(results()))
        return
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * given.minutes
    for run in list(missing(results())):
        if time.monotonic() > end:
            print("The time is up. Run it again for the rest.")
            return
        write(FILE, Row, [one(*run)], more=True)
        print(*run, flush=True)


if __name__ == "__main__":
    main()
