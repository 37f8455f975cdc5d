"""The troubles: small models, their batches, and what goes wrong with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """How large the models and their batches are."""

    width: int = 32
    layers: int = 2
    heads: int = 2
    context: int = 32
    batch: int = 16


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        ]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """The next letter at every place."""

    def __init__(self, letters: int, size: Size) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.letter(x) + self.place.weight[: x.shape[1]])))


class Recurrent(nn.Module):
    """A network of rectified units that begins with `gain` times the identity."""

    def __init__(self, inputs: int, width: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, width, batch_first=True, nonlinearity="relu")
        self.out = nn.Linear(width, outputs)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(gain * torch.eye(width))
            self.rnn.bias_hh_l0.zero_()
            self.rnn.bias_ih_l0.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Trouble:
    """A model, batches, and what goes wrong."""

    rates: ClassVar[dict[str, float]]  # good ones without clipping and trouble
    steps = 200
    chance: float  # the loss of guessing without looking
    model: nn.Module

    def __init__(self, size: Size, text: Path, seed: int) -> None:
        self.size, self.source = size, torch.Generator().manual_seed(seed)

    def losses(self) -> tuple[Tensor, Tensor]:
        """The loss of a batch to train on, and what it would be without the trouble."""
        raise NotImplementedError

    def test(self) -> Tensor:
        """The loss on held-out data without the trouble."""
        raise NotImplementedError


class Nothing(Trouble):
    """A transformer learns to continue a text, and nothing is wrong."""

    rates: ClassVar = {"Adam": 0.01, "SGD": 0.3}

    def __init__(self, size: Size, text: Path, seed: int) -> None:
        super().__init__(size, text, seed)
        letters = text.read_text()
        known = {letter: code for code, letter in enumerate(sorted(set(letters)))}
        windows = torch.tensor([known[letter] for letter in letters]).unfold(0, size.context + 1, 1)
        held_out = len(windows) // 10
        self.letters = len(known)
        self.chance = math.log(self.letters)
        self.windows = windows[: -held_out - size.context]
        self.held_out = windows[-held_out :: max(held_out // 64, 1)]
        self.model = self.make()

    def make(self) -> nn.Module:
        return Transformer(self.letters, self.size)

    def batch(self) -> Tensor:
        where = torch.randint(len(self.windows), (self.size.batch,), generator=self.source)
        return self.windows[where]

    def loss(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def losses(self) -> tuple[Tensor, Tensor]:
        loss = self.loss(self.batch())
        return loss, loss.detach()

    def test(self) -> Tensor:
        with torch.no_grad():
            return self.loss(self.held_out)


class BadBatches(Nothing):
    """One batch in fifty is noise, and its loss 10 to 1000 times too large."""

    share = 0.02

    def losses(self) -> tuple[Tensor, Tensor]:
        windows = self.batch()
        noise = torch.randint(self.letters, tuple(windows.shape), generator=self.source)
        chance, size = torch.rand(2, generator=self.source).tolist()
        if chance >= self.share:
            loss = self.loss(windows)
            return loss, loss.detach()
        with torch.no_grad():
            clean = self.loss(windows)
        return 10 ** (1 + 2 * size) * self.loss(noise), clean


class LongBadBatches(BadBatches):
    """The same for 600 steps, so that rules that learn from many steps first can act."""

    steps = 600


class Exploding(Nothing):
    """A recurrent network learns the text; its matrix begins at 1.2 times the identity."""

    rates: ClassVar = {"Adam": 0.01, "SGD": 0.1}
    gain = 1.2

    def make(self) -> nn.Module:
        width = 2 * self.size.width
        network = Recurrent(width, width, self.letters, self.gain)
        return nn.Sequential(nn.Embedding(self.letters, width), network)


class HeavyTails(Trouble):
    """A smooth function to learn from labels with noise of Student's t, 1.2 degrees of freedom."""

    rates: ClassVar = {"Adam": 0.003, "SGD": 0.1}
    steps = 500
    noise, degrees, inputs = 0.5, 1.2, 4

    def __init__(self, size: Size, text: Path, seed: int) -> None:
        super().__init__(size, text, seed)
        width = 2 * size.width
        layers = [nn.Linear(self.inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.model = nn.Sequential(*layers, nn.Linear(width, 1))
        self.directions = torch.randn(self.inputs, 2, generator=self.source)
        self.held_out = self.points(1024)
        self.chance = self.held_out[1].var().item()

    def points(self, many: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(many, self.inputs, generator=self.source)
        return x, torch.sin(x @ self.directions).sum(1, keepdim=True)

    def errors(self, many: int) -> Tensor:
        """Student's t: a normal over the root of a chi-square over its degrees of freedom."""
        normal = torch.randn(many, 1, generator=self.source)
        gamma = torch._standard_gamma(torch.full((many, 1), self.degrees / 2), self.source)
        return self.noise * normal / (2 * gamma / self.degrees).sqrt()

    def losses(self) -> tuple[Tensor, Tensor]:
        x, y = self.points(2 * self.size.batch)
        guess, errors = self.model(x), self.errors(len(y))
        return F.mse_loss(guess, y + errors), F.mse_loss(guess, y).detach()

    def test(self) -> Tensor:
        with torch.no_grad():
            return F.mse_loss(self.model(self.held_out[0]), self.held_out[1])


TROUBLES: dict[str, type[Trouble]] = {
    "bad batches": BadBatches,
    "bad batches, 600 steps": LongBadBatches,
    "nothing wrong": Nothing,
    "exploding": Exploding,
    "heavy tails": HeavyTails,
}
