"""Race chains against each other: small language models on the same data, some of it corrupted.

    make demo                   # in an environment that it makes
    pip install -e .            # or in one of yours, then
    python examples/demo.py
    python examples/demo.py --steps 200 --chains '["Guard", "Lion", {"type": "LR", "lr": 0.001}]'

Every chain trains a model of its own that learns to write the next letter of a harbour's log. All
begin with the same weights and see the same batches. One batch in thirty is corrupted: its letters
are noise and its loss is ten to a thousand times too large, as if a shard of the data were broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from torchzero_clip import Chain, Modular

TEXT = Path(__file__).parent / "data" / "harbour.txt"
CONTEXT, BATCH, WIDTH = 12, 64, 128
CORRUPTED = 1 / 30  # the share of batches that are noise
WARM = 0.2  # the share of the steps in which a rise of the loss is no news

LR = {"type": "LR", "lr": 0.003}
CHAINS = {
    "no clipping": [{"type": "Adam"}, LR],
    "ClipNorm": [{"type": "ClipNorm", "max_norm": 1.0, "dim": "global"}, "Adam", LR],
    "ZClip": [{"type": "ZClip", "max_norm": None}, "Adam", LR],
}


class Data:
    """Windows of a text as numbers, and the batches that are drawn from it."""

    def __init__(self, device: torch.device, seed: int) -> None:
        text = TEXT.read_text()
        letters = sorted(set(text))
        codes = torch.tensor([letters.index(c) for c in text])
        windows = codes.unfold(0, CONTEXT + 1, 1)
        held_out = len(windows) // 10
        self.letters = len(letters)
        self.train = windows[:-held_out]
        self.test = windows[-held_out:].to(device)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> tuple[Tensor, float]:
        """Windows, and what their loss is multiplied by: 1 unless they are corrupted."""
        where = torch.randint(len(self.train), (BATCH,), generator=self.generator)
        chance, size = torch.rand(2, generator=self.generator).tolist()
        noise = torch.randint(self.letters, (BATCH, CONTEXT + 1), generator=self.generator)
        if chance < CORRUPTED:
            return noise.to(self.device), 10 ** (1 + 2 * size)
        return self.train[where].to(self.device), 1.0


class Racer:
    """A model, the chain that trains it, and how that went."""

    def __init__(self, name: str, chain: Chain, letters: int, device: torch.device) -> None:
        self.name = name
        self.model = nn.Sequential(
            nn.Embedding(letters, 16),
            nn.Flatten(),
            nn.Linear(16 * CONTEXT, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, letters),
        ).to(device)
        self.opt = Modular(self.model.named_parameters(), chain)
        self.losses: list[float] = []
        self.times: list[float] = []
        self.clipped = torch.zeros((), dtype=torch.int64, device=device)
        self.best, self.spike = math.inf, 0.0

    def loss(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return nn.functional.cross_entropy(logits, windows[:, -1])

    def train(self, windows: Tensor, weight: float) -> None:
        self.opt.zero_grad()
        (weight * self.loss(windows)).backward()
        begin = time.perf_counter()
        self.opt.step()
        self.times.append(time.perf_counter() - begin)
        flags = [v for name, v in self.opt.metrics().items() if name.endswith("/clipped")]
        if flags:
            self.clipped += torch.stack([flag.any() for flag in flags]).any()

    @torch.no_grad()
    def test(self, windows: Tensor, settled: bool) -> None:
        loss = self.loss(windows).item()
        self.losses.append(loss)
        if settled:
            rise = loss - self.best
            self.spike = max(self.spike, rise if math.isfinite(loss) else math.inf)
        self.best = min(self.best, loss) if math.isfinite(loss) else self.best

    def row(self) -> dict[str, Any]:
        skipped = [v for k, v in self.opt.metrics().items() if k.endswith("/skipped")]
        return {
            "chain": self.name,
            "final loss": self.losses[-1],
            "worst spike": self.spike,
            "steps clipped": int(self.clipped.item()) + sum(int(v) for v in skipped),
            "ms in opt.step()": 1000 * statistics.median(self.times),
        }


class Progress:
    """A bar that moves in a terminal, and a few lines where there is none."""

    def __init__(self, steps: int, out: TextIO) -> None:
        self.steps, self.out, self.live = steps, out, out.isatty()
        self.often = 1 if self.live else max(steps // 5, 1)

    def show(self, step: int, racers: list[Racer]) -> None:
        if step % self.often and step != self.steps:
            return
        losses = "   ".join(f"{r.name} {r.losses[-1]:.3f}" for r in racers)
        if not self.live:
            self.out.write(f"step {step}/{self.steps}   {losses}\n")
            return
        done = 24 * step // self.steps
        line = f"[{'#' * done}{'.' * (24 - done)}] {step}/{self.steps}   {losses}"
        width = shutil.get_terminal_size().columns - 1
        self.out.write("\r" + line[:width].ljust(width) + ("\n" if step == self.steps else ""))
        self.out.flush()


def race(chains: dict[str, Chain], steps: int, seed: int, device: torch.device) -> list[Racer]:
    """Train a model with each chain, side by side."""
    data, racers = Data(device, seed), []
    for name, chain in chains.items():
        torch.manual_seed(seed)
        racers.append(Racer(name, chain, data.letters, device))
    progress = Progress(steps, sys.stdout)
    every = max(steps // 100, 1)
    for step in range(1, steps + 1):
        windows, weight = data.batch()
        for racer in racers:
            racer.train(windows, weight)
            if step % every == 0 or step in (1, steps):
                racer.test(data.test, settled=step > WARM * steps)
        progress.show(step, racers)
    return racers


def introduction(chains: dict[str, Chain]) -> str:
    """What trouble is in the data, and who meets it."""
    lines = [
        f"{CORRUPTED:.1%} of the batches are corrupted: "
        "noise for letters, and a loss 10 to 1000 times too large."
    ]
    for name, chain in chains.items():
        warm = max((getattr(link, "warmup_steps", 0) for link in chain), default=0)
        note = f"   (its limit comes from the norms of {warm} steps of warm-up)" if warm else ""
        lines.append(f"  {name}: {chain!r}{note}")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as text."""
    shown = [
        {k: f"{v:.3f}" if isinstance(v, float) else str(v) for k, v in r.items()} for r in rows
    ]
    widths = {key: max([len(key), *(len(r[key]) for r in shown)]) for key in rows[0]}
    first, *others = widths

    def line(cells: dict[str, str]) -> str:
        return "   ".join(
            [cells[first].ljust(widths[first]), *(cells[k].rjust(widths[k]) for k in others)]
        )

    head = line({key: key for key in widths})
    return "\n".join([head, "-" * len(head), *map(line, shown)])


def read_chains(texts: list[str] | None) -> dict[str, Chain]:
    """Chains by name, from JSON as Chain.from_config takes it."""
    if texts is None:
        return {name: Chain.from_config(config) for name, config in CHAINS.items()}
    chains: dict[str, Chain] = {}
    for text in texts:
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"a chain is JSON, such as {json.dumps(CHAINS['ClipNorm'])}: {error}, in {text}"
            ) from None
        try:
            chain = Chain.from_config(config)
            Modular(
                [("w", torch.zeros(1, requires_grad=True))], chain
            )  # whether the links fit together
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}, in {text}") from None
        if not len(chain):
            raise ValueError(f"an empty chain, in {text}")
        name = " → ".join(type(link).__name__ for link in chain)
        while name in chains:
            name += "'"
        chains[name] = chain
    return chains


def arguments(given: list[str] | None) -> tuple[argparse.Namespace, dict[str, Chain], torch.device]:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="how many steps each chain takes")
    parser.add_argument(
        "--chains",
        nargs="+",
        metavar="JSON",
        help="chains of your own, as Chain.from_config takes them",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, mps")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results as JSON as well"
    )
    options = parser.parse_args(given)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        chains = read_chains(options.chains)
    except ValueError as error:
        parser.error(f"--chains: {error}")
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        parser.error(
            f"--device: {options.device!r} cannot be used here: {str(error).splitlines()[0]}"
        )
    if options.out is not None and not (
        options.out.parent.is_dir() and os.access(options.out.parent, os.W_OK)
    ):
        parser.error(f"--out: there is no folder {options.out.parent} to write into")
    return options, chains, device


def main(given: list[str] | None = None) -> list[dict[str, Any]]:
    options, chains, device = arguments(given)
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    print(introduction(chains), flush=True)
    racers = race(chains, options.steps, options.seed, device)
    rows = [racer.row() for racer in racers]
    print(f"\n{table(rows)}\n")
    print(
        "final loss: on text held out.  worst spike: how far that loss rose above its best before."
    )
    if options.out is not None:
        curves = {racer.name: racer.losses for racer in racers}
        options.out.write_text(json.dumps({"table": rows, "losses": curves}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
