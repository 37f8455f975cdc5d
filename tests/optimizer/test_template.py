"""torch's recipe for a distributed checkpoint, whose template is a step with zero gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers import seed, some
from tests.modules.rows.row import with_lr
from tests.table import GOOD, Case
from torchzero_clip import LR, Accumulate, Adam, ClipNorm, Modular, Transform, When, named
from torchzero_clip.published import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one

FIRST = {case.cls: case for case in reversed(GOOD)}
CHAINS: dict[str, list[Any]] = {
    "accumulated": [Accumulate(2), ClipNorm(1.0), Adam()],
    "sometimes": [When(lambda step: step > 2, Adam())],
}


def chain_of(name: str) -> list[Transform]:
    if name in NAMES:
        return [named(name, lr=0.01)]
    return [*copy.deepcopy(CHAINS[name]), LR(0.01)]


def start(chain: list[Transform]) -> tuple[nn.Module, Modular]:
    seed()
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 6, bias=False))
    return model, Modular(model.named_parameters(), *chain)


def train(model: nn.Module, opt: Modular, steps: range) -> None:
    for step in steps:
        seed(step)
        model(torch.randn(8, 6)).square().sum().backward()
        opt.step()
        opt.zero_grad()


def as_torch_says(chain: Any, folder: Path) -> None:
    """A run that is saved and loaded as torch's tutorial does ends as the run that went on."""
    model, opt = start(chain())
    train(model, opt, range(6))
    held = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(held, checkpoint_id=folder, no_dist=True)
    train(model, opt, range(6, 12))

    other, resumed = start(chain())
    found = {
        "model": get_model_state_dict(other),
        "opt": get_optimizer_state_dict(other, resumed),
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(other, found["model"])
    set_optimizer_state_dict(other, resumed, found["opt"])
    train(other, resumed, range(6, 12))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", [*CHAINS, *some([*NAMES], one_in=12)])
def test_torchs_recipe_resumes_a_name(name: str, tmp_path: Path) -> None:
    as_torch_says(lambda: chain_of(name), tmp_path)


MECHANISMS = {
    "ClipNorm",  # without state
    "ClipNormGrowth",  # state for each norm
    "AutoClip",  # a window of norms
    "ZClip",  # scalars of the whole model
    "Adam",
    "Adafactor",  # state by shape
    "Prodigy",
    "Accumulate",  # steps without an update
    "Guard",
    "When",
    "InBasis",  # matrices
    "Partition",
    "ScheduleFree",  # averaged weights
    "WeightEMA",
}
assert {cls.__name__ for cls in FIRST} >= MECHANISMS


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in MECHANISMS else pytest.mark.slow)
        for name, case in ((case.cls.__name__, case) for case in FIRST.values())
    ],
)
def test_torchs_recipe_resumes_every_module(case: Case, tmp_path: Path) -> None:
    as_torch_says(lambda: with_lr(case.make(), 0.01), tmp_path)
