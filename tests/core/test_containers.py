"""Sequences and mappings of other libraries are taken where lists and dicts are."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from types import MappingProxyType

import pytest
import torch

from tests.helpers import at_once, one, param
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Modular,
    Orthogonalize,
    Partition,
    Reset,
    Scale,
    named,
    optimizer_class,
    per_example_clip,
    schedule,
)

KINDS = [UserList, deque]


def foreign(value, kind):
    """Plain data in the containers of somebody else."""
    if isinstance(value, dict):
        return UserDict({key: foreign(x, kind) for key, x in value.items()})
    return kind(foreign(x, kind) for x in value) if isinstance(value, list) else value


@at_once("kind", KINDS)
def test_arguments(kind):
    assert Adam(kind([0.9, 0.95])) == Adam((0.9, 0.95))
    assert ClipNorm(1.0, dim=kind([0, 1])) == ClipNorm(1.0, dim=(0, 1))
    assert Reset(Adam(), 9, keep=kind(["step"])) == Reset(Adam(), 9, keep=("step",))
    triples = kind([kind([3.0, -4.0, 2.0])])
    assert Orthogonalize(coefficients=triples) == Orthogonalize(coefficients=((3.0, -4.0, 2.0),))
    assert named("adamw", betas=kind([0.9, 0.95])) == named("adamw", betas=(0.9, 0.95))


def test_mappings_as_arguments():
    branches, labels = {"a": Adam(), "b": Scale(2.0)}, {"weight": "a", "*": "b"}
    proxies = MappingProxyType(branches), MappingProxyType(labels)
    assert Partition(*proxies) == Partition(branches, labels)
    opt = Modular([("weight", one()), ("bias", one())], Partition(*proxies), LR(0.1))
    opt.step()


@at_once("kind", KINDS)
def test_configs(kind):
    config = [
        "Guard",
        {"type": "ClipNorm", "max_norm": 1.0, "dim": [0, 1]},
        ["Scale", {"factor": 2.0}],
        {"type": "Adam", "betas": [0.9, 0.95]},
        {"type": "When", "condition": {"function": "builtins:bool"}, "tfm": ["Adam", "Sign"]},
        {"type": "LR", "lr": 0.1},
    ]
    assert Chain.from_config(foreign(config, kind)) == Chain.from_config(config)


@at_once("kind", KINDS)
def test_groups(kind):
    groups = kind([MappingProxyType({"params": [one()], "betas": kind([0.8, 0.9])})])
    opt = Modular(groups, Adam(), LR(0.1))
    opt.add_param_group(MappingProxyType({"params": [one()], "betas": kind([0.7, 0.9])}))
    opt.param_groups[0]["betas"] = kind([0.6, 0.9])
    opt.step()
    assert [group["betas"] for group in opt.param_groups] == [(0.6, 0.9), (0.7, 0.9)]
    made = optimizer_class(Adam(), LR(0.1))([one()], betas=kind([0.8, 0.9]))
    assert made.param_groups[0]["betas"] == (0.8, 0.9)


@at_once("kind", KINDS)
def test_functions_of_a_schedule_and_a_batch(kind):
    opt = Modular([{"params": [one()]}, {"params": [one()]}], LR(0.1))
    schedule(opt, "lr", kind([lambda step: 0.5, lambda step: 0.25]))
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.25]
    batch = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])

    def loss(params, x, y):
        return (params["w"] * x - y).square()

    found = per_example_clip(loss, {"w": param(2.0)[0]}, kind(batch), ClipNorm(1.0))
    meant = per_example_clip(loss, {"w": param(2.0)[0]}, batch, ClipNorm(1.0))
    assert repr(found) == repr(meant)


def test_text_is_no_sequence_of_letters():
    with pytest.raises(TypeError, match=r"betas must be 2 numbers, .*, got '12'"):
        Adam("12")
    with pytest.raises(ValueError, match="unknown transform 'Adm'"):
        Chain.from_config("Adm")
