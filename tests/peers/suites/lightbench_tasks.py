"""LightBench's exploding gradients, solved within its steps by what clips them.

Its problem is the mean of exp(scale · |w|), and a run wins when the root mean square of w comes
below 0.01 within 500 steps at some learning rate. Its search for rates needs CUDA; here it is a
grid.
"""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock

import pytest
import torch

from torchzero_clip import LR, ClipNorm, ClipValue, Modular

SOURCE = "HomebrewML/LightBench"
COMMIT = "98c77c68c4ae858dd39f057184c3f85dbbf731e1"
FILES = {"lightbench/exploding_gradient.py": "c5772e56a024", "lightbench/utils.py": "bfb773c454af"}
RUNS = [__file__]
PATHS = ["."]
SETTINGS: dict[str, str] = {}
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}

RATES = [10.0 ** (k / 2) for k in range(-4, 1)]
CHAINS = {
    "clip_norm": lambda lr: [ClipNorm(1.0), LR(lr)],
    "clip_value": lambda lr: [ClipValue(1.0), LR(lr)],
    "nothing": lambda lr: [LR(lr)],
}
STEEP = ("medium", "hard", "extreme", "nightmare")


def put_ours() -> None:
    """What its modules import, and the problems do not need."""
    for name in ("typer", "optuna", "heavyball"):
        sys.modules[name] = MagicMock()
    for name in ("utils", "chainable", "helpers"):
        sys.modules[f"heavyball.{name}"] = MagicMock()


def wins(chain: str, difficulty: str) -> bool:
    task = importlib.import_module("lightbench.exploding_gradient")
    won = importlib.import_module("lightbench.utils").param_norm_win_condition(0.01, 0)
    for rate in RATES:
        torch.manual_seed(0)
        model = task.ExplodingGradient(**task.configs[difficulty], dim=512)
        optimizer = Modular(model.parameters(), *CHAINS[chain](rate))
        for _ in range(500):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if won(model, None)[0]:
                return True
    return False


@pytest.mark.parametrize("difficulty", ["trivial", "easy", *STEEP])
@pytest.mark.parametrize("chain", ["clip_norm", "clip_value"])
def test_a_clip_in_front_of_plain_descent_wins(chain, difficulty):
    assert wins(chain, difficulty)


@pytest.mark.parametrize("difficulty", STEEP)
def test_without_it_plain_descent_loses(difficulty):
    assert not wins("nothing", difficulty)
