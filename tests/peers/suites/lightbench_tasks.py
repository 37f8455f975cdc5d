"""LightBench's exploding and adversarial gradients, solved within its steps by plain chains.

Its first problem is the mean of exp(scale · |w|), and a run wins when the root mean square of w
comes below 0.01 within 500 steps at some learning rate; its second is a parabola with a pull that
swings, and 0.001 within 100 steps. Its search for rates needs CUDA; here it is a grid.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from torchzero_clip import LR, ClipNorm, ClipValue, Modular, Momentum, SpikeClip

SOURCE = "HomebrewML/LightBench"
COMMIT = "98c77c68c4ae858dd39f057184c3f85dbbf731e1"
FILES = {
    "lightbench/exploding_gradient.py": "c5772e56a024",
    "lightbench/adversarial_gradient.py": "b212077267f6",
    "lightbench/utils.py": "bfb773c454af",
}
RUNS = [__file__]
PATHS = ["."]
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS = {
    "swings.*trivial": "the pull only grows in these 100 steps, and no rate comes within 0.004",
}

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


def put_ours() -> None:
    """What its modules import, and the problems do not need."""
    for name in ("typer", "optuna", "heavyball"):
        sys.modules[name] = MagicMock()
    for name in ("utils", "chainable", "helpers"):
        sys.modules[f"heavyball.{name}"] = MagicMock()


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
