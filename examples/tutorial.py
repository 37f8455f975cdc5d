"""The training script of docs/tutorial.md: one bad batch, without clipping and with it.

    python examples/tutorial.py

It prints the losses, and writes the two pictures of the page, tutorial_before.png and
tutorial_after.png, into the folder that --out names.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, Recorder, Transform

STEPS = 400
BAD = 250  # this batch has its targets in cents instead of dollars


def batches():
    """Yield the inputs and targets of each step."""
    source = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        x = torch.rand(64, 4, generator=source)
        y = (x[:, :1] * x[:, 1:2] + torch.sin(3 * x[:, 2:3])) * 10
        yield x, 100 * y if step == BAD else y


def train(*links: Transform) -> Recorder:
    """Train a small network with a chain, and return the record of the run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    opt = Modular(model.named_parameters(), *links)
    recorder = Recorder(opt)
    for x, y in batches():
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        recorder.log(loss=loss)
        opt.step()
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path())
    out = parser.parse_args().out
    measure = ClipNorm(float("inf"), dim="global")  # measures the norm, clips nothing
    runs = {
        "before": ("Adam without clipping", train(measure, Adam(), LR(1e-2))),
        "after": (
            "Adam after Guard and ClipNorm(10.0)",
            train(Guard(), ClipNorm(10.0, dim="global"), Adam(), LR(1e-2)),
        ),
    }
    for name, (title, recorder) in runs.items():
        loss = recorder.history()["loss"]
        spread = ", ".join(
            f"step {step}: {loss[step - 1]:.2f}" for step in (249, 250, 251, 300, 400)
        )
        print(f"{title}: {spread}")
        recorder.plot(out / f"tutorial_{name}.png", title=title)


if __name__ == "__main__":
    main()
