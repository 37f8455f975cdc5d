"""Draw the picture of the README: what clipping does in the demo, by two of its chains.

    python examples/demo_picture.py

It runs those two, a minute or two, and writes docs/assets/demo.svg.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from race.chains import CHAINS, read_chains
from race.console import Progress
from race.picture import BAD, INK, LIMIT, MUTED, NORM, STYLE
from race.training import Result, race

STEPS, SEED = 1000, 0  # those of `make demo`
PLAIN, CLIPPED = "no clipping", "ZClip"
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "demo.svg"


def main() -> None:
    torch.set_num_threads(1)
    chains = read_chains([CHAINS[PLAIN], CHAINS[CLIPPED]])
    results = race(chains, STEPS, SEED, torch.device("cpu"), Progress(STEPS))
    PICTURE.write_text(picture(*results))
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


def picture(plain: Result, clipped: Result) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 2.7))
        losses, norms = figure.subplots(1, 2)
        for axes, low, high in ((losses, 0, 5), (norms, 0.2, 5000)):
            lines = [[(x, low), (x, high)] for x in clipped.corrupted]
            axes.add_collection(LineCollection(lines, colors=BAD, lw=0.8, alpha=0.5, zorder=0))
            axes.set_xlim(0, STEPS)
            axes.set_ylim(low, high)
            axes.set_xlabel("step; purple: a corrupted batch")

        losses.set_title("Loss on held-out text")
        for result, name, colour in ((plain, PLAIN, INK), (clipped, CLIPPED, NORM)):
            steps, values = zip(*result.test_losses.items(), strict=True)
            losses.plot(steps, values, color=colour, lw=1.6)
            place = {"ha": "right", "va": "bottom", "color": colour, "weight": "bold"}
            losses.text(STEPS - 8, values[-1] + 0.5, f"{name}: {values[-1]:.2f}", **place)

        pairs = zip(clipped.norm, clipped.limit, strict=True)
        after = [min(norm, limit) if limit == limit else norm for norm, limit in pairs]
        rows = enumerate(zip(after, clipped.norm, strict=True), start=1)
        cut = [[(step, low), (step, high)] for step, (low, high) in rows if high > low]
        norms.set_title(f"Norm of the gradient, before and after {CLIPPED}")
        norms.set_yscale("log")
        norms.add_collection(LineCollection(cut, colors=LIMIT, lw=1.4, label="before"))
        norms.plot(range(1, STEPS + 1), after, color=NORM, lw=0.9, label="after")
        norms.legend(loc="upper left", ncols=2, labelcolor=MUTED)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = re.sub(r"(?<=[ \"ML])-?\d+\.\d+(?=[ \"\n])", lambda m: f"{float(m[0]):.1f}", text)
    text = re.sub(r' clip-path="[^"]*"| id="[a-z0-9]*_\d+"', "", text)
    return re.sub(r"\s*\n\s*", "\n", text)


if __name__ == "__main__":
    main()
