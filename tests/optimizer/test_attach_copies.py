"""Optimizers with a handle: copies say that they have none, and sparse ones are refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer, SparseAdam

from torchzero_clip import ClipValue, attach


def by_torch_save(opt: Optimizer) -> Optimizer:
    memory = io.BytesIO()
    torch.save(opt, memory)
    memory.seek(0)
    out: Optimizer = torch.load(memory, weights_only=False)
    return out


COPIES: dict[str, Callable[[Optimizer], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda opt: pickle.loads(pickle.dumps(opt)),
    "torch.save": by_torch_save,
    "with its model": lambda opt: copy.deepcopy({"opt": opt})["opt"],
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_says_that_it_has_no_transforms(way: str) -> None:
    opt = SGD([Parameter(torch.zeros(1))], lr=1.0)
    attach(opt, ClipValue(1.0))
    with pytest.warns(
        UserWarning, match="the copy of this SGD does not include .* call attach for the copy"
    ):
        other = COPIES[way](opt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(other, ClipValue(1.0)).remove()
        COPIES[way](other)


@pytest.mark.parametrize("way", COPIES)
def test_without_a_handle_a_copy_is_silent(way: str) -> None:
    opt = SGD([Parameter(torch.zeros(1))], lr=1.0)
    before = set(vars(opt))
    attach(opt, ClipValue(1.0)).remove()
    assert set(vars(opt)) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        COPIES[way](opt)


def test_state_dicts_are_no_copies() -> None:
    opt = SGD([Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    attach(opt, ClipValue(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def test_sparse_adam_is_refused_before_anything_is_attached() -> None:
    opt = SparseAdam(nn.Embedding(4, 2, sparse=True).parameters())
    before = set(vars(opt))
    with pytest.raises(
        TypeError,
        match=r"^attach: transforms do not support the sparse gradients that SparseAdam needs",
    ):
        attach(opt, ClipValue(1.0))
    assert set(vars(opt)) == before


def test_the_advice_about_sparse_gradients_suits_who_attached() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    opt = SGD(layer.parameters(), lr=1.0)
    attach(opt, ClipValue(1.0))
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"use a separate torch\.optim\.SparseAdam"):
        opt.step()
