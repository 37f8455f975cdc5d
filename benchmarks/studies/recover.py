"""What snapshots of `Recover` cost: 400 steps with two of them against those without.

    python -m benchmarks.studies.recover                  # GPT-2's shapes, some minutes
    python -m benchmarks.studies.recover --shapes quick   # a trial

The two kinds of steps alternate in blocks of 50, from the same weights and gradients. It prints the
mean of each and their ratio, with its quartiles over blocks, the longest step of each, and the
memory of the ring. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.circumstances import watched
from benchmarks.step.bars import quartiles
from benchmarks.step.shapes import SHAPES
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, Recover

STEPS, EVERY, BLOCK = 400, 200, 50
QUICK = [(64, 64), (64,)] * 4


class Holder(nn.Module):
    """Parameters of some shapes, as a model."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tensors = nn.ParameterList([0.02 * torch.randn(shape) for shape in shapes])


def side(shapes: Any, compile: bool) -> tuple[Holder, Modular]:
    model = Holder(shapes)
    links = Guard(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-4)
    return model, Modular(model.parameters(), *links, compile=compile)


def measure(shapes: Any, compile: bool, steps: int = STEPS, every: int = EVERY) -> list[str]:
    """The lines to print."""
    plain, (model, opt) = side(shapes, compile), side(shapes, compile)
    recover = Recover(opt, model, every=every)
    times: dict[str, list[float]] = {"without": [], "with": []}
    loss = torch.ones(())
    for params in (plain[0], model):
        for p in params.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
    for _ in range(recover.check):  # state, kernels, replays, and a first snapshot
        plain[1].step()
        opt.step()
        recover.step(loss)
    for begin in range(0, steps, BLOCK):
        for name, row in times.items():
            for _ in range(min(BLOCK, steps - begin)):
                start = time.perf_counter()
                if name == "without":
                    plain[1].step()
                else:
                    opt.step()
                    recover.step(loss)
                row.append(1000 * (time.perf_counter() - start))
    means = {name: statistics.fmean(row) for name, row in times.items()}
    kept = sum([p.numel() for p in model.parameters()])
    lines = [
        f"{name:<8} mean {means[name]:8.2f} ms   median {statistics.median(row):8.2f}   "
        f"longest {max(row):8.2f}"
        for name, row in times.items()
    ]
    ratios = [
        statistics.fmean(times["with"][begin : begin + BLOCK])
        / statistics.fmean(times["without"][begin : begin + BLOCK])
        for begin in range(0, steps, BLOCK)
    ]
    whole = means["with"] / means["without"]
    lines.append(f"ratio of the means {whole:.3f}, of blocks of {BLOCK} steps {quartiles(ratios)}")
    ring = f"the ring has {recover.nbytes / 2**20:.0f} MiB, {recover.nbytes / kept:.1f} bytes"
    lines.append(f"{ring} a parameter, in {len(recover._ring)} snapshots")
    return lines


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", choices=["gpt2", "quick"], default="gpt2")
    options = parser.parse_args(given)
    shapes = SHAPES["gpt2"]() if options.shapes == "gpt2" else QUICK
    for compile in (False, True):
        print("compile=True" if compile else "the default engine")
        for line in measure(shapes, compile):
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    with watched("benchmarks.studies.recover"):
        main()
