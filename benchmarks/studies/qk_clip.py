"""A small transformer whose attention logits explode, with and without QKClip.

It copies a text of random letters from a distance, with four heads of queries that share two heads
of keys. Lion at a rate far too high, and without decay, lets the weights of queries and keys grow
by the same amount in every step, and their products with the square of that.

    python -m benchmarks.studies.qk_clip
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchzero_clip import LR, Heads, Lion, Modular, QKClip, Transform, largest_logits

WIDTH, HEADS, SHARED, LENGTH, LETTERS, BACK = 64, 4, 2, 32, 16, 5


class Attention(nn.Module):
    """Causal attention with shared keys, which remembers its largest logits."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH * SHARED // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, half), nn.Linear(WIDTH, half)
        self.maxima = torch.zeros(SHARED)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        ]
        self.maxima = largest_logits(q, k, causal=True)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    """Two layers of attention and of two linear layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.attention = nn.ModuleList([Attention() for _ in range(2)])
        self.mlp = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(2)
            ]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(5)])
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        out: Tensor = self.head(self.norms[4](x))
        return out

    def heads(self, name: str, p: Tensor) -> Heads | None:
        """What QKClip asks: the rows of queries and keys, and their largest logits."""
        layer, _, kind = name.rpartition(".")[0].rpartition(".")
        if kind not in ("q", "k"):
            return None
        attention = self.get_submodule(layer)
        assert isinstance(attention, Attention)
        return Heads("query" if kind == "q" else "key", attention.maxima)


def train(clip: bool, steps: int, tau: float = 100.0) -> Iterator[tuple[int, float, float]]:
    """The step, the loss and the largest logit of all heads, step by step."""
    torch.manual_seed(0)
    model = Model()
    last: list[Transform] = [QKClip(model.heads, tau)] if clip else []
    opt = Modular(model.named_parameters(), Lion(), LR(0.003), *last)
    for step in range(1, steps + 1):
        text = torch.randint(LETTERS, (16, LENGTH))
        opt.zero_grad()
        logits = model(text)
        loss = F.cross_entropy(logits[:, BACK:].flatten(0, 1), text[:, :-BACK].flatten())
        loss.backward()
        opt.step()
        largest = max([attention.maxima.max().item() for attention in model.attention])
        yield step, loss.item(), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    runs = [list(train(clip, steps)) for clip in (False, True)]
    print("| step | largest logit | loss | with QKClip | loss |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for plain, clipped in zip(*runs, strict=True):
        if plain[0] in (1, 10, 50) or plain[0] % 200 == 0:
            rows = [f"{run[2]:.4g} | {run[1]:.3f}" for run in (plain, clipped)]
            print(f"| {plain[0]} | {rows[0]} | {rows[1]} |")
    worst = max(run[2] for run in runs[1])
    print(f"The largest logit of all steps with QKClip: {worst:.4g}")


if __name__ == "__main__":
    main()
