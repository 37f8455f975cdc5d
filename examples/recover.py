"""Train on a shard of thirty batches with shuffled letters: clip, skip, or roll back and leave out.

    python examples/recover.py
    python examples/recover.py --steps 60 --out build     # a short run, with a shard of six

The model and the text are the same as in `make demo`. The shard shuffles the letters of all windows
of a batch. So a shuffled batch has the letters of a good batch in another order. The script prints
the result of each run. It writes the picture of docs/recover.md and its losses,
benchmarks/results/recover.json.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from demo_picture import THEMES
from matplotlib.figure import Figure
from race.data import BATCH, Data
from race.model import LanguageModel
from race.picture import BAD, LIMIT, MUTED, NORM, STYLE, themed
from torch import Tensor

from torchzero_clip import LR, Adam, ClipNorm, Modular, Recover, SkipSpike, Transform

ROOT = Path(__file__).resolve().parent.parent
STEPS, SEED, RATE, TESTED = 600, 0, 1e-2, 10
CLIP = ClipNorm(1.0, dim="global"), Adam(), LR(RATE)
SKIP = SkipSpike(), *CLIP
RUNS: dict[str, tuple[Sequence[Transform], bool, bool]] = {  # the chain, the shard, Recover
    "without the shard": (SKIP, False, False),
    "clip": (CLIP, True, False),
    "clip and skip": (SKIP, True, False),
    "Recover": (SKIP, True, True),
}


class Batches:
    """Batches of windows that can return to an earlier batch.

    Args:
        data: The text.
        count: The number of batches.
        shard: The numbers of the batches with shuffled letters, counted from 1.
        there: Whether to include the shuffled batches.
    """

    def __init__(self, data: Data, count: int, shard: Sequence[int], there: bool) -> None:
        every = [self.drawn(data, i in shard) for i in range(1, count + 1)]
        self.windows = [t for i, t in enumerate(every, 1) if there or i not in shard]
        self.place = 0

    def drawn(self, data: Data, bad: bool) -> Tensor:
        windows = data.train[torch.randint(len(data.train), (BATCH,), generator=data.generator)]
        order = torch.randperm(windows.numel(), generator=data.generator)
        return windows.flatten()[order].view_as(windows) if bad else windows

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < len(self.windows):
            self.place += 1
            yield self.windows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.place = state_dict["place"]


def train(
    links: Sequence[Transform], count: int, shard: Sequence[int], there: bool, recovers: bool
) -> tuple[list[list[float]], list[Any]]:
    """Return steps and test losses in the order of measurement, and the rollbacks."""
    data = Data(torch.device("cpu"), SEED)
    batches = Batches(data, count, shard, there)
    torch.manual_seed(SEED)
    model = LanguageModel(len(data.letters))
    opt = Modular(model.named_parameters(), *links)
    options = {"every": 100, "parts": [batches]} if recovers else {"every": 10**6}
    recover = Recover(opt, model, **options) if recovers else None
    seen, step = [[0, tested(model, data)]], 0
    for windows in batches if recover is None else recover.batches(batches):
        loss = model.loss(windows)
        opt.zero_grad()
        loss.backward()
        opt.report(loss=loss)
        opt.step()
        step += 1
        if step % TESTED == 0:
            seen.append([step, tested(model, data)])
        if recover is not None and (back := recover.step(loss)):
            step = back.to
            seen.append([step, tested(model, data)])
    if seen[-1][0] != step:
        seen.append([step, tested(model, data)])
    return seen, [list(back) for back in recover.events] if recover else []


@torch.no_grad()
def tested(model: LanguageModel, data: Data) -> float:
    return model.loss(data.test).item()


def main(given: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"batches of a run ({STEPS})")
    parser.add_argument("--out", type=Path, help="a folder for both files, instead of their places")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    half, length = options.steps // 2, options.steps // 20
    shard = range(half + 1, half + length + 1)
    found: dict[str, Any] = {"shard": [shard[0], shard[-1]], "runs": {}}
    print(f"{options.steps} batches; {shard[0]} to {shard[-1]} have shuffled letters")
    for name, (links, there, recovers) in RUNS.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Recover: step")
            losses, backs = train(links, options.steps, shard, there, recovers)
        rounded = [[step, float(f"{loss:.5g}")] for step, loss in losses]
        found["runs"][name] = {"losses": rounded, "backs": backs}
        left = f", {sum([back[3] for back in backs])} batches left out" if backs else ""
        print(f"  {name:<18} ends at {losses[-1][1]:.3f} behind step {losses[-1][0]}{left}")
    folder = options.out
    if folder is not None:
        folder.mkdir(exist_ok=True)
    for path, text in (
        (ROOT / "docs" / "assets" / "recover.svg", picture(found)),
        (ROOT / "benchmarks" / "results" / "recover.json", json.dumps(found) + "\n"),
    ):
        (path if folder is None else folder / path.name).write_text(text, encoding="utf-8")
    return found


def picture(found: dict[str, Any]) -> str:
    """Draw the losses of all runs."""
    colours = dict(zip(RUNS, (MUTED, LIMIT, BAD, NORM), strict=True))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 3.2))
        axes = figure.subplots()
        highest = 0.0
        axes.axvspan(found["shard"][0] - 0.5, found["shard"][1] + 0.5, color=BAD, alpha=0.2, lw=0)
        for name, run in found["runs"].items():
            steps, losses = zip(*run["losses"], strict=True)
            label = f"{name}: {losses[-1]:.2f}"
            width = 4 if name == "without the shard" else 1.5  # the same losses as with Recover
            axes.plot(steps, losses, color=colours[name], lw=width, label=label)
            highest = max(highest, *losses)
        axes.set_xlabel("step; purple: thirty batches with shuffled letters")
        axes.set_title("Loss on held-out text")
        axes.legend(loc="upper right", labelcolor=MUTED)
        axes.set_ylim(0, 1.05 * highest)  # nothing is clipped at the frame of the axes
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    ends = ", ".join([f"{n} {run['losses'][-1][1]:.2f}" for n, run in found["runs"].items()])
    label = f"The loss of a small language model with a bad shard in the middle; the ends: {ends}."
    text = themed(file.getvalue(), label).replace(".race *{", THEMES + ".race *{")
    return re.sub(r' clip-path="[^"]*"', "", text)


if __name__ == "__main__":
    main()
