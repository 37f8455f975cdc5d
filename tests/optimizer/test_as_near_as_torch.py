"""In float32 and bfloat16 a chain is as near to the truth as torch's optimizer of its name.

The measure is that of HeavyBall's `benchmarks/matrix.py`: both step on the gradients of one small
run, and the truth is torch's own run over them in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.nn import Conv1d, Embedding, LayerNorm, Linear, Module, Parameter
from torch.optim import Optimizer

from tests.helpers import at_once
from torchzero_clip import Modular, named

STEPS = 40
GIVEN = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "Adam": {"lr": 2e-3, "weight_decay": 0.02},
    "Adamax": {"lr": 2e-3},
    "AdamW": {"lr": 2e-3, "weight_decay": 0.02},
    "ASGD": {"lr": 1e-2},
    "NAdam": {"lr": 2e-3, "weight_decay": 0.02},
    "RAdam": {"lr": 2e-3, "weight_decay": 0.02},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9},
    "Rprop": {"lr": 1e-3},
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = Embedding(40, 12), Conv1d(12, 20, 3)
        self.norm, self.mix, self.head = LayerNorm(20), Linear(20, 20), Linear(20, 4)

    def forward(self, words: Tensor) -> Tensor:
        seen = self.conv(self.words(words).mT).mean(2)
        return self.head(torch.tanh(self.mix(self.norm(seen))))


@cache
def run() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights to begin with, and the gradients of each step of a run from there."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, gradients = Net(), []
        params = list(model.parameters())
        begin = [p.detach().clone() for p in params]
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        for _ in range(STEPS):
            words, target = torch.randint(40, (16, 6)), torch.randn(16, 4)
            (model(words) - target).square().sum().div(16).backward()
            gradients.append([p.grad.clone() for p in params])
            optimizer.step()
            optimizer.zero_grad()
    return begin, gradients


@contextmanager
def scalars_in(dtype: torch.dtype) -> Iterator[None]:
    """torch keeps some numbers, as the product of NAdam's momenta, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def end(make: partial[Optimizer], dtype: torch.dtype) -> Tensor:
    begin, gradients = run()
    params = [Parameter(p.to(dtype, copy=True)) for p in begin]
    optimizer = make(params)
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(dtype, copy=True)
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in params])


@cache
def truth(name: str) -> Tensor:
    with scalars_in(torch.float64):
        return end(partial(getattr(torch.optim, name), **GIVEN[name]), torch.float64)


def ours(name: str, fused: bool, dtype: torch.dtype) -> float:
    chain = named(name.lower(), **GIVEN[name])
    return distance(name, end(lambda params: Modular(params, chain, fused=fused), dtype))


def distance(name: str, reached: Tensor) -> float:
    return float((reached - truth(name)).norm() / truth(name).norm())


EVERY = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("Adafactor", "AdamW", "Rprop", "SGD") else pytest.mark.slow
        )
        for name in GIVEN
    ],
)
"""Identities with torch are quick tests of their own, so that four stand for all."""


@at_once("fused", [True, False])
@EVERY
def test_in_float64_a_chain_reaches_the_truth(name, fused):
    assert ours(name, fused, torch.float64) < 1e-14


@at_once("fused", [True, False])
@at_once("dtype", [torch.float32, torch.bfloat16])
@EVERY
def test_what_rounding_costs_is_no_more_than_in_torch(name, dtype, fused):
    torchs = distance(name, end(partial(getattr(torch.optim, name), **GIVEN[name]), dtype))
    assert 0 < ours(name, fused, dtype) < 1.1 * torchs
