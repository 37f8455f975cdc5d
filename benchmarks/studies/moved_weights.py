"""The share of weights that ever moved, by kind, rate and rounding: a small transformer.

    python -m benchmarks.studies.moved_weights --minutes 20  # adds runs until all are there
    python -m benchmarks.studies.moved_weights --table  # what results/moved_weights.csv says

It is the one of `benchmarks.studies.rounding`, with clip and Adam, and no decay. A weight counts as
moved where the model has seen another number in its place behind any of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn

from benchmarks import axes
from benchmarks.rows import digits, read, write
from benchmarks.studies.rounding import RUNS, training

FILE = Path(__file__).parents[1] / "results" / "moved_weights.csv"
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
SEEDS, STEPS = range(10), 400
KINDS = ("weights of norms", "matrices", "embeddings", "biases")
STYLES = dict(zip(RUNS, ("place2", "place0", "place1", "place3", "place4"), strict=True))
LEFT, TOP, WIDTH, HEIGHT, APART = 62, 34, 250, 130, 110


@dataclass
class Row:
    rounding: str
    rate: float
    seed: int
    kind: str
    share: float


def kind_of(model: nn.Module, name: str) -> str:
    owner = model.get_submodule(name.rpartition(".")[0])
    if name.endswith("bias"):
        return "biases"
    if isinstance(owner, nn.LayerNorm):
        return "weights of norms"
    return "embeddings" if isinstance(owner, nn.Embedding) else "matrices"


def one(name: str, rate: float, seed: int, steps: int = STEPS) -> list[Row]:
    """What moved in a run from its seed."""
    model, step = training(*RUNS[name], seed, rate)
    start = [p.detach().clone() for p in model.parameters()]
    moved = [torch.zeros_like(p, dtype=torch.bool) for p in start]
    for _ in range(steps):
        step()
        for p, at, seen in zip(model.parameters(), start, moved, strict=True):
            seen |= p != at
    rows = []
    for kind in KINDS:
        named = zip(model.named_parameters(), moved, strict=True)
        flags = torch.cat([seen.flatten() for (n, _), seen in named if kind_of(model, n) == kind])
        rows.append(Row(name, rate, seed, kind, digits(flags.float().mean().item())))
    return rows


def missing(rows: Sequence[Row]) -> Iterator[tuple[str, float, int]]:
    """What has to run next, seed by seed."""
    done = {(row.rounding, row.rate, row.seed) for row in rows}
    for seed, rate, name in product(SEEDS, RATES, RUNS):
        if (name, rate, seed) not in done:
            yield name, rate, seed


def shares(rows: Sequence[Row], name: str, kind: str, rate: float) -> list[float]:
    """One for each seed."""
    return [x.share for x in rows if (x.rounding, x.kind, x.rate) == (name, kind, rate)]


def table() -> str:
    """The means over all seeds, with the smallest and the largest."""
    rows = read(FILE, Row)
    lines = [f"| | {' | '.join(f'{rate:.0e}' for rate in RATES)} |", "|---" * 6 + "|"]
    for kind, name in product(KINDS, RUNS):
        cells = [spread(shares(rows, name, kind, rate)) for rate in RATES]
        lines.append(f"| {kind}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(found: Sequence[float]) -> str:
    low, middle, high = min(found), statistics.mean(found), max(found)
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def picture() -> str:
    """A panel for each kind of weights: the shares over the rates, a line for each rounding."""
    rows, parts = read(FILE, Row), []
    for i, kind in enumerate(KINDS):
        left = LEFT + i % 2 * (WIDTH + APART)
        top = TOP + i // 2 * (HEIGHT + axes.ROOM + TOP)
        parts.append(f'<text x="{left}" y="{top - 12}">{kind}</text>')
        for share in (0.0, 0.5, 1.0):
            y = top + (1 - share) * HEIGHT
            parts.append(f'<line class="grid" x1="{left}" x2="{left + WIDTH}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
        for rate, x in zip(RATES, places(left), strict=True):
            if f"{rate:e}".startswith("1"):
                label = f"{rate:.0e}".replace("e-0", "e-")
                parts.append(
                    f'<text x="{x:g}" y="{top + HEIGHT + 19}" text-anchor="middle">{label}</text>'
                )
        for name, style in STYLES.items():
            means = [statistics.mean(shares(rows, name, kind, rate)) for rate in RATES]
            ends = zip(places(left), means, strict=True)
            points = " ".join(f"{x:.1f},{top + (1 - share) * HEIGHT:.1f}" for x, share in ends)
            parts.append(f'<polyline class="{style}" points="{points}"/>')
        parts.append(axes.names(left, top, WIDTH, HEIGHT, "learning rate", ""))
    width, height = LEFT + 2 * WIDTH + APART + 20, 2 * (TOP + HEIGHT + axes.ROOM)
    legend = ", ".join(f'<span class="{style}">{name}</span>' for name, style in STYLES.items())
    return (
        f'<figure class="picture">\n<svg viewBox="0 0 {width} {height}" role="img" aria-label="The '
        f'share of weights that ever moved">{"".join(parts)}</svg>\n<figcaption>The share of '
        f"weights that ever moved within {STEPS} steps, the mean of {len(SEEDS)} seeds: {legend}."
        "</figcaption>\n</figure>"
    )


def places(left: float) -> list[float]:
    return [left + i / (len(RATES) - 1) * WIDTH for i in range(len(RATES))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    end, rows = time.monotonic() + 60 * args.minutes, read(FILE, Row)
    if args.table:
        print(table())
        return
    for run in list(missing(rows)):
        if time.monotonic() > end:
            print("time is up: run it again for the rest")
            return
        write(FILE, Row, one(*run), more=True)
        print(*run, flush=True)


if __name__ == "__main__":
    main()
