"""What `rounding=` does for bfloat16 parameters: a thousand small steps, and a language model.

python -m benchmarks.studies.rounding [--steps 400] [--seeds 3]
python -m benchmarks.studies.rounding --time [--set vit] [--rounds 30]

With --time compiled steps of a model in the shape of GPT-2 small alternate, of its parameters in
bfloat16 with a rounding and with "nearest": the ratio of their times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.circumstances import watched
from benchmarks.step.shapes import SHAPES
from benchmarks.studies.state_dtype import ratio
from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay

TEXT = Path(__file__).parents[2] / "examples" / "data" / "harbour.txt"
CONTEXT, BATCH, WIDTH = 16, 32, 64
RUNS = {
    "float32": (torch.float32, "nearest"),
    "bfloat16, nearest": (torch.bfloat16, "nearest"),
    "bfloat16, stochastic": (torch.bfloat16, "stochastic"),
    "bfloat16, kahan": (torch.bfloat16, "kahan"),
    "bfloat16, exact": (torch.bfloat16, "exact"),
}


def small_steps(dtype: torch.dtype, rounding: str) -> float:
    """Where a weight of 1 is after a thousand steps of 1e-4 towards 0.9."""
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    opt = Modular([p], LR(1e-4), rounding=rounding)
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        opt.step()
    return p.item()


class Writer(nn.Module):
    """A transformer block that predicts each next letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letter(x) + self.place.weight
        q, k, v = self.qkv(self.norms[0](h)).unflatten(-1, (3, 4, WIDTH // 4)).movedim(2, 0)
        rows = [t.transpose(1, 2) for t in (q, k, v)]
        seen = nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
        h = h + self.mix(seen.transpose(1, 2).flatten(2))
        h = h + self.down(nn.functional.gelu(self.up(self.norms[1](h))))
        return self.out(self.norms[2](h))


def windows() -> tuple[Tensor, int]:
    """All windows of the text, and how many letters there are."""
    text = TEXT.read_text()
    letters = sorted(set(text))
    return torch.tensor([letters.index(c) for c in text]).unfold(0, CONTEXT + 1, 1), len(letters)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def training(
    dtype: torch.dtype, rounding: str, seed: int, lr: float
) -> tuple[nn.Module, Callable[[], None]]:
    """A small model, and what does its next step."""
    text, letters = windows()
    torch.manual_seed(seed)
    model = Writer(letters).to(dtype)
    opt = Modular(
        model.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(lr), rounding=rounding
    )
    generator = torch.Generator().manual_seed(seed)

    def step() -> None:
        rows = torch.randint(len(text), (BATCH,), generator=generator)
        opt.zero_grad()
        loss_of(model, text[rows]).backward()
        opt.step()

    return model, step


def language_model(
    dtype: torch.dtype, rounding: str, seed: int = 0, steps: int = 400, lr: float = 3e-4
) -> float:
    """The loss of a small model at the end of training, on all windows of the text."""
    model, step = training(dtype, rounding, seed, lr)
    for _ in range(steps):
        step()
    model.float()  # what the weights are worth, whatever arithmetic they were trained in
    with torch.no_grad():
        return loss_of(model, windows()[0][::8]).item()


def times(shapes: str, rounding: str, rounds: int) -> str:
    """The time of a compiled step over that of one with "nearest"."""
    generator = torch.Generator().manual_seed(0)
    opts = []
    for kind in (rounding, "nearest"):
        params = []
        for shape in SHAPES[shapes]():
            params.append(nn.Parameter(torch.randn(shape, generator=generator).div_(50).bfloat16()))
            params[-1].grad = torch.randn(shape, generator=generator).bfloat16()
        chain = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(1e-4)
        opts.append(Modular(params, *chain, compile=True, rounding=kind))
    return ratio(opts[0].step, opts[1].step, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--set", choices=SHAPES, default="gpt2", help="of the shapes to time")
    parser.add_argument("--rounds", type=int, default=30, help="of steps that are timed")
    args = parser.parse_args()
    if args.time:
        print("| rounding | of the time of nearest |\n|---|---|")
        for rounding in ("exact", "kahan", "stochastic"):
            print(f"| {rounding} | {times(args.set, rounding, args.rounds)} |", flush=True)
        return
    print("| weights | 1000 steps of 1e-4 from 1 to 0.9 | loss of the language model |")
    print("|---|---|---|")
    for name, (dtype, rounding) in RUNS.items():
        losses = [language_model(dtype, rounding, s, args.steps) for s in range(args.seeds)]
        spread = f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        print(f"| {name} | {small_steps(dtype, rounding):.4f} | {spread} |", flush=True)


if __name__ == "__main__":
    with watched("benchmarks.studies.rounding", counts="--time" not in sys.argv):
        main()
