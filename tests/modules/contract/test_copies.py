"""Descriptions and copies: a transform cannot be changed, an optimizer can be copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.helpers import gradients, parameters, same, set_grads
from tests.modules.contract.common import growing, owns_lr
from tests.table import Case, every, mechanisms, sampled
from torchzero_clip import LR, Modular


@every()
def test_a_transform_cannot_be_changed(case):
    tfm = case.make()
    for name in tfm.__dataclass_fields__:
        with pytest.raises(AttributeError, match=f"{type(tfm).__name__}.{name} cannot be set"):
            setattr(tfm, name, 1.0)


@sampled(one_in=2)
def test_one_transform_serves_two_optimizers(case):
    shared, description = case.make(), repr(case.make())
    kept = dict(vars(shared))
    runs = []
    for tfms in ([shared, shared], [case.make(), case.make()]):
        models = [parameters(case.shapes), parameters(case.shapes)]
        tail = [] if owns_lr(case) else [LR(0.1)]
        opts = [Modular(m.items(), t, *tail) for m, t in zip(models, tfms, strict=True)]
        for i in range(4):  # one starts late, and sees other gradients
            for j in range(2) if i else range(1):
                set_grads(models[j], gradients(case.shapes, 10 * j + i, scale=i + 1))
                opts[j].step()
        runs.append(models)
    for a, b in zip(*runs, strict=True):
        same(a, b)
    assert repr(shared) == description
    assert vars(shared) == kept


def by_deepcopy(opt: Modular) -> Modular:
    return copy.deepcopy(opt)


def by_pickle(opt: Modular) -> Modular:
    return pickle.loads(pickle.dumps(opt))


def by_torch_save(opt: Modular) -> Modular:
    memory = io.BytesIO()
    torch.save(opt, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@sampled()
def test_a_copy_of_an_optimizer_in_mid_training_continues_to_the_last_bit(case):
    check_copies(case, (by_deepcopy,))


@mechanisms()
def test_what_pickle_and_torch_save_make_of_it_continues_to_the_last_bit(case):
    check_copies(case, (by_pickle, by_torch_save))


def check_copies(case: Case, ways: Sequence[Callable[[Modular], Modular]]) -> None:
    params = parameters(case.shapes)
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    for step in growing(case, 3):
        set_grads(params, step)
        opt.step()
    copies = [duplicate(opt) for duplicate in ways]
    models = [dict(zip(params, c.param_groups[0]["params"], strict=True)) for c in copies]
    for name in params:
        assert len({id(model[name]) for model in (params, *models)}) == 1 + len(ways)
    for i in range(3, 7):
        grads = gradients(case.shapes, i, scale=i + 1)
        for model, optimizer in zip((params, *models), (opt, *copies), strict=True):
            set_grads(model, {name: g.clone() for name, g in grads.items()})
            optimizer.step()
        for model in models:
            same(model, params)
