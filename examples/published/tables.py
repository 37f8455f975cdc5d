"""Four small tables, and logistic regression on them."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DATA = Path(__file__).parents[1] / "data"
TABLES = ("digits", "breast_cancer", "wine", "iris")
PENALTY = 1e-3  # half the square of the weights: classes that a plane parts have no best weights


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """Return the features and the class of each example."""
    text = gzip.decompress((DATA / f"{name}.csv.gz").read_bytes()).decode()
    rows = torch.tensor([[float(x) for x in line.split(",")] for line in text.split()])
    return rows[:, :-1], rows[:, -1].long()


class Parts:
    """A table in random order: three quarters for training, with standardized features."""

    def __init__(self, name: str, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)
        x, y = table(name)
        order = torch.randperm(len(x), generator=self.source)
        x, y = x[order], y[order]
        count = 3 * len(x) // 4
        mean, deviation = x[:count].mean(0), x[:count].std(0)
        x = (x - mean) / deviation.clamp(min=1e-6).where(deviation > 0, torch.ones(()))
        self.x, self.y = x[:count], y[:count]
        self.held_out = x[count:], y[count:]
        self.classes = int(y.max()) + 1

    def batches(self, size: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the examples, in a new order each time."""
        for _ in range(epochs):
            for rows in torch.randperm(len(self.x), generator=self.source).split(size):
                yield self.x[rows], self.y[rows]


class Regression(nn.Linear):
    """Logistic regression from weights at zero, with a penalty so that the loss has a minimum."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.x.shape[1], parts.classes)
        self.parts = parts
        for p in self.parameters():
            nn.init.zeros_(p)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        squares = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(self(x), y) + PENALTY / 2 * squares

    @torch.no_grad()
    def above(self, least: float) -> float:
        """Return the difference between the training loss and its minimum."""
        gap = self.loss(self.parts.x, self.parts.y).item() - least
        return max(gap, 1e-7) if math.isfinite(gap) else math.inf

    @torch.no_grad()
    def accuracy(self) -> float:
        x, y = self.parts.held_out
        return (self(x).argmax(1) == y).float().mean().item()


def least(parts: Parts) -> float:
    """Return the minimum of the loss, by quasi-Newton steps."""
    model = Regression(parts)
    options = {"max_iter": 2000, "tolerance_grad": 1e-8, "tolerance_change": 1e-12}
    solver = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        solver.zero_grad()
        loss = model.loss(parts.x, parts.y)
        loss.backward()
        return loss

    solver.step(closure)
    return closure().item()
