"""Tables, CSV and a picture of the results."""

from __future__ import annotations

import csv
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import torchzero_clip
from benchmarks.circumstances import processor
from benchmarks.step.chains import COMPILED, OURS, PEERS
from benchmarks.step.timing import GRAPH, Result

COLUMNS = [
    *("device", "shapes", "chain", "gradients", "contestant", "rounds"),
    *("ms", "ms_low", "ms_high"),
    *("ours_over_it", "ours_over_it_low", "ours_over_it_high"),
    *("floor_ms", "copy_ms"),
]


SHORT = {
    OURS: "ours",
    COMPILED: "ours compiled",
    OURS + GRAPH: "ours as a graph",
    COMPILED + GRAPH: "ours compiled, as a graph",
}


def environment(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    found = {"torchzero_clip": torchzero_clip.__version__, "torch": torch.__version__}
    found["python"] = platform.python_version()
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["cpu"] = processor()
    found["cores"], found["threads"] = str(os.cpu_count()), str(torch.get_num_threads())
    if device == "cuda":
        found["gpu"], found["cuda"] = torch.cuda.get_device_name(), str(torch.version.cuda)
    return found


def rows(result: Result) -> Iterator[list[Any]]:
    """A row for every contestant; its ratio is ours over it, a graph's over a graph."""
    for name, times in result.times.items():
        mine = OURS + GRAPH if name.endswith(GRAPH) and OURS + GRAPH in result.times else OURS
        low, middle, high = result.ratio(mine, name)
        first, half, third = (1000 * t for t in statistics.quantiles(times, n=4))
        yield [
            result.device, result.shapes, result.chain, result.gradients, name, len(times),
            half, first, third, middle, low, high, 1000 * result.floor, 1000 * result.copy,
        ]  # fmt: skip


def table(result: Result) -> str:
    """The race as text: milliseconds with quartiles, and ours over each with quartiles."""
    best = {result.best(), result.best(graph=True)}
    lines = [f"{result.shapes}, {result.chain}, gradients {result.gradients}, {result.device}"]
    for row in sorted(rows(result), key=lambda row: row[6]):
        name, n, ms, first, third, ratio, low, high = row[4:12]
        mark = "← the best of torch" if name in best else ""
        lines.append(
            f"  {name:<31}{ms:>9.2f} ms ({first:.2f}–{third:.2f})".ljust(64)
            + f"ours / it {ratio:.2f} ({low:.2f}–{high:.2f}), {n} rounds {mark}".rstrip()
        )
    for what, seconds in (("the floor", result.floor), ("a copy of as many bytes", result.copy)):
        if seconds:
            ratios = ", ".join(
                f"{name} / it {result.seconds(key) / seconds:.2f}"
                for key, name in SHORT.items()
                if key in result.times
            )
            lines.append(f"  {what:<31}{1000 * seconds:>9.2f} ms".ljust(64) + ratios)
    return "\n".join([*lines, *[f"  {line}" for line in result.missing]])


def write_csv(path: Path, about: Mapping[str, Any], results: Sequence[Result]) -> None:
    """A CSV file, with what the figures depend on in comments at its head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in about.items())
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            for row in rows(result):
                writer.writerow([f"{x:.4g}" if isinstance(x, float) else x for x in row])


def picture(path: Path, results: Sequence[Result]) -> bool:
    """Ours over the best of torch, a bar for every race; False where matplotlib is missing."""
    try:
        import matplotlib.figure
    except ImportError:
        return False
    shown = [(result, best) for result in results if (best := result.best()) is not None]
    if not shown:
        return False
    figure = matplotlib.figure.Figure(figsize=(8, 0.28 * len(shown) + 1), layout="constrained")
    axes = figure.subplots()
    for i, (result, best) in enumerate(shown):
        low, middle, high = result.ratio(OURS, best)
        colour = "tab:green" if middle <= 1 else "tab:orange"
        axes.barh(i, middle, xerr=[[middle - low], [high - middle]], color=colour)
    names = [f"{result.shapes}, {result.chain}, {result.gradients}" for result, _ in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_ylabel("model, chain, gradients")
    axes.set_xlabel("time of a step over that of the best spelling in torch; left of 1 is faster")
    figure.savefig(path)
    return True
