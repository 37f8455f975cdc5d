"""Write the demo's picture and results for the documentation.

    python examples/demo_picture.py

The script runs the six chains of `make demo`, which takes minutes. It writes docs/assets/demo.svg,
the picture of two chains, and benchmarks/results/race.json. The build of the documentation makes
the page of the race from race.json, which contains no times.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from race import picture as drawing
from race.chains import read_chains
from race.console import Progress
from race.picture import BAD, INK, LIMIT, MUTED, NORM, STYLE, themed, variables
from race.report import html
from race.training import Result, race

from torchzero_clip import Chain

STEPS, SEED = 1000, 0  # those of `make demo`
PLAIN, CLIPPED = "no clipping", "ZClip"
ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
RESULTS = ROOT / "benchmarks" / "results" / "race.json"
# In a page of the documentation the theme is the reader's choice; elsewhere it is the system's.
THEMES = (
    f".race {{{variables(0)}}} @media (prefers-color-scheme: dark) {{.race {{{variables(1)}}}}} "
    f"[data-md-color-scheme=default] .race {{{variables(0)}}} "
    f"[data-md-color-scheme=slate] .race {{{variables(1)}}} "
)


def main() -> None:
    torch.set_num_threads(1)
    results = race(read_chains(None), STEPS, SEED, torch.device("cpu"), Progress(STEPS))
    for path, text in ((ASSETS / "demo.svg", drawn(results)), (RESULTS, kept(results))):
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text)} letters")


def drawn(results: list[Result]) -> str:
    """Draw the picture."""
    found = {result.name: result for result in results}
    return picture(found[PLAIN], found[CLIPPED])


def page(results: list[Result]) -> str:
    """Return the page."""
    device = torch.device("cpu")
    return html(results, "python examples/demo.py", SEED, device, drawing, timed=False)


def kept(results: list[Result]) -> str:
    """Return the results as one line per chain, with five digits."""

    def short(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: short(value) for key, value in x.items()}
        if isinstance(x, list):
            return list(map(short, x))
        return float(f"{x:.5g}") if isinstance(x, float) else x

    lines = [{**vars(result), "chain": result.chain.to_config()} for result in results]
    return "".join([json.dumps(short(line)) + "\n" for line in lines])


def read(path: Path = RESULTS) -> list[Result]:
    """Return the results from the file that `main` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["chain"] = Chain.from_config(row["chain"])
        row["test_losses"] = {int(step): loss for step, loss in row["test_losses"].items()}
    return [Result(**row) for row in rows]


def picture(plain: Result, clipped: Result) -> str:
    """Draw the losses of both chains, and the gradient norm before and after the rule."""
    count = len(clipped.norm)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 2.7))
        losses, norms = figure.subplots(1, 2)
        for axes, low, high in ((losses, 0, 5), (norms, 0.2, 5000)):
            lines = [[(x, low), (x, high)] for x in clipped.corrupted]
            axes.add_collection(LineCollection(lines, colors=BAD, lw=0.8, alpha=0.5, zorder=0))
            axes.set_xlim(0, count)
            axes.set_ylim(low, high)
            axes.set_xlabel("step; purple: a corrupted batch")
        losses.set_ylabel("loss")
        norms.set_ylabel("norm")

        losses.set_title("Loss on held-out text")
        for result, name, colour in ((plain, PLAIN, INK), (clipped, CLIPPED, NORM)):
            steps, values = zip(*result.test_losses.items(), strict=True)
            losses.plot(steps, values, color=colour, lw=1.6)
            place = {"ha": "right", "va": "bottom", "color": colour, "weight": "bold"}
            losses.text(0.992 * count, values[-1] + 0.5, f"{name}: {values[-1]:.2f}", **place)

        pairs = zip(clipped.norm, clipped.limit, strict=True)
        after = [min(norm, limit) if limit == limit else norm for norm, limit in pairs]
        rows = enumerate(zip(after, clipped.norm, strict=True), start=1)
        cut = [[(step, low), (step, high)] for step, (low, high) in rows if high > low]
        norms.set_title(f"Norm of the gradient, before and after {CLIPPED}")
        norms.set_yscale("log")
        norms.add_collection(LineCollection(cut, colors=LIMIT, lw=1.4, label="before"))
        norms.plot(range(1, count + 1), after, color=NORM, lw=0.9, label="after")
        norms.legend(loc="upper left", ncols=2, labelcolor=MUTED)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    label = (
        "Left: the loss of a small language model on corrupted data; without clipping it ends at "
        f"{plain.final_loss:.2f}, with {CLIPPED} at {clipped.final_loss:.2f}. Right: the norm of "
        f"its gradient before and after {CLIPPED}, which cuts spikes of up to two thousand to "
        "about one."
    )
    text = themed(file.getvalue(), label).replace(".race *{", THEMES + ".race *{")
    return re.sub(r' clip-path="[^"]*"', "", text)


if __name__ == "__main__":
    main()
