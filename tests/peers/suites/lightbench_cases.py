"""Cases around LightBench's problems: chains, and whether they win at some learning rate."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from torchzero_clip import LR, ClipNorm, ClipValue, Modular, Momentum, SpikeClip

CHAINS = {
    "clip_norm": lambda lr: [ClipNorm(1.0), LR(lr)],
    "clip_value": lambda lr: [ClipValue(1.0), LR(lr)],
    "nothing": lambda lr: [LR(lr)],
    "momentum": lambda lr: [Momentum(0.9, nesterov=True), LR(lr)],
    "spike_clip": lambda lr: [SpikeClip(), Momentum(0.9, nesterov=True), LR(lr)],
}
STEEP = ("medium", "hard", "extreme", "nightmare")
LEVELS = ("trivial", "easy", *STEEP)
MANY = [10 ** (1 + k / 22) for k in range(50)]  # of a loss that is a mean of 1024 entries


def wins(chain: str, rates: Iterable[float], target: float, steps: int, make: Any) -> bool:
    won = importlib.import_module("lightbench.utils").param_norm_win_condition(target, 0)
    for rate in rates:
        torch.manual_seed(0)
        model = make()
        optimizer = Modular(model.parameters(), *CHAINS[chain](rate))
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if won(model, None)[0]:
                return True
    return False


def explosion(chain: str, level: str) -> bool:
    task = importlib.import_module("lightbench.exploding_gradient")
    rates = [10.0 ** (k / 2) for k in range(-4, 1)]
    make = lambda: task.ExplodingGradient(**task.configs[level], dim=512)  # noqa: E731
    return wins(chain, rates, 0.01, 500, make)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("chain", ["clip_norm", "clip_value"])
def test_a_clip_in_front_of_plain_descent_wins(chain, level):
    assert explosion(chain, level)


@pytest.mark.parametrize("level", STEEP)
def test_without_it_plain_descent_loses(level):
    assert not explosion("nothing", level)


@pytest.mark.parametrize("chain", ["momentum", "spike_clip"])
@pytest.mark.parametrize("level", LEVELS)
def test_momentum_wins_against_a_pull_that_swings(level, chain):
    task = importlib.import_module("lightbench.adversarial_gradient")
    assert wins(chain, MANY, 0.001, 100, lambda: task.Model(**task.configs[level]))
