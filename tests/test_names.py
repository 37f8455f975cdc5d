"""Names and forms that people try first: they work, or a sentence says what to write."""

from __future__ import annotations

import copy
import importlib
import math
import pickle

import pytest
import torch

import torchzero_clip
from tests.helpers import at_once, param, same
from torchzero_clip import (
    LR,
    Adam,
    AutoClip,
    Chain,
    ClipNorm,
    Modular,
    Momentum,
    RMSprop,
    clip_grad_norm_,
    named,
    spec,
)
from torchzero_clip.published import NAMES

OF_TORCH = [name for name in torch.optim.__all__ if name[:1].isupper() and name != "Optimizer"]


def imported(name):
    exec(f"from torchzero_clip import {name}", {})


@at_once("name", [name for name in OF_TORCH if not hasattr(torchzero_clip.descent, name)])
def test_an_optimizer_of_torch_is_not_here_and_a_sentence_says_what_is(name):
    with pytest.raises(ImportError, match=f"torchzero_clip has no class {name}") as said:
        imported(name)
    there = name.lower() in NAMES
    assert (f'named("{name.lower()}"' if there else f"use torch.optim.{name}") in str(said.value)


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("AdamW", "Adam(), WeightDecay(weight_decay=0.01), LR(lr=0.001)"),
        ("SGD", "Momentum()"),
        ("LAMB", "TrustRatio()"),
        ("StableAdamW", "StableAdam(weight_decay=0.01)"),
    ],
)
def test_a_method_that_is_a_chain_is_shown_as_one(name, links):
    with pytest.raises(ImportError) as said:
        imported(name)
    assert links in str(said.value)


def test_a_name_that_nobody_has_is_missing_as_in_every_module():
    assert not hasattr(torchzero_clip, "Nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        imported("Nothing")
    assert importlib.import_module("torchzero_clip.compat") is torchzero_clip.compat


def test_a_number_as_the_mode_of_auto_clip_is_its_percentile():
    with pytest.raises(TypeError, match=r"did you mean AutoClip\('percentile', percentile=10\)"):
        AutoClip(10)
    with pytest.raises(ValueError, match=r"must be one of \['auto', 'percentile'\], got 'p'"):
        AutoClip("p")


def test_inf_may_be_written_as_the_norm_type_of_torch():
    grads = [3.0, -4.0]
    p, q = param(0.0, 0.0, grad=grads), param(0.0, 0.0, grad=grads)
    assert clip_grad_norm_([p], 1.0, ord="inf") == clip_grad_norm_([q], 1.0, ord=math.inf)
    same(p.grad, q.grad)
    assert spec.norm(grads, "inf") == spec.norm(grads, math.inf)


# ---------------------------------------------------------------------- sums and equality


def test_chains_add_up():
    clip, rest = Chain(ClipNorm(1.0)), Chain(Adam(), LR(1e-3))
    assert repr(clip + rest) == "Chain(ClipNorm(max_norm=1.0), Adam(), LR(lr=0.001))"
    assert ClipNorm(1.0) + rest == clip + rest == clip + Adam() + LR(1e-3)
    assert len(Chain(Adam(), name="own") + clip) == 2
    with pytest.raises(TypeError, match="unsupported operand"):
        clip + 1


def test_equal_links_are_equal():
    assert ClipNorm(1.0) == ClipNorm(1.0) != ClipNorm(2.0)
    assert named("lamb") == named("lamb") != named("lambc")
    assert Adam() != ClipNorm(1.0)
    assert ClipNorm(1.0, dim=(0, 1)) == ClipNorm(1.0, dim=[0, 1]) != ClipNorm(1.0, dim=(0, 2))
    assert ClipNorm(1.0) != ClipNorm(torch.tensor(1.0))
    assert LR(True + 0.0) == LR(1.0)


def test_a_tensor_that_may_change_is_equal_to_itself_alone():
    lr = torch.tensor(0.1)
    assert LR(lr) == LR(lr) != LR(lr.clone())


def test_equal_links_have_one_hash_copied_and_pickled_too():
    links = [named("lamb"), copy.deepcopy(named("lamb")), pickle.loads(pickle.dumps(named("lamb")))]
    assert len(set(links)) == 1
    assert len({ClipNorm(1.0), ClipNorm(2.0)}) == 2
    clip = ClipNorm(1.0)
    assert hash(clip) == hash(clip.with_values({"max_norm": 2.0}).with_values({"max_norm": 1.0}))


# ---------------------------------------------------------------------- momentum


@pytest.mark.parametrize("momentum", [1.0, 1.25])
def test_momentum_of_one_and_above_is_that_of_torch_with_a_warning(momentum):
    ours, theirs = param(0.0), param(0.0)
    with pytest.warns(
        UserWarning,
        match=f"momentum should be below 1, .* got {momentum}. With this momentum, the sum",
    ) as said:
        opt = Modular([ours], Momentum(momentum), LR(0.1))
    assert {warning.category for warning in said} == {UserWarning}
    other = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    for grad in (1.0, -2.0, 0.5):
        ours.grad, theirs.grad = torch.tensor([grad]), torch.tensor([grad])
        opt.step()
        other.step()
    same(ours.detach(), theirs.detach())
    with pytest.warns(UserWarning, match="RMSprop: momentum should be below 1"):
        RMSprop(momentum=momentum)
