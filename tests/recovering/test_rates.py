"""The smaller rate behind a rollback, and the hooks that make it: whose they are, when they go."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import at_once
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, Recover, attach, release

ENGINES: list[dict[str, Any]] = [{}, {"fused": False}, {"compile": True}]
OPTIONS: dict[str, Any] = {"every": 2, "check": 2, "window": 4, "slower": (0.5, 100)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recover: step")
        yield


class Slowed:
    """One weight with a gradient of 1, whose run went back a moment ago."""

    def __init__(self, **options: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.w = self.model.weight
        self.opt = Modular(self.model.parameters(), LR(0.1), **options)
        self.recover = self.watched()
        for loss in (1.0, 1.0, math.nan, 1.0):
            self.moved()
            self.recover.step(loss)
        assert self.recover.events

    def watched(self) -> Recover:
        return Recover(self.opt, self.model, **OPTIONS)

    def moved(self, **given: Any) -> float:
        """How far a step goes: the rate that it has had."""
        self.w.grad = torch.ones_like(self.w)
        before = self.w.item()
        self.opt.step(**given)
        return round(before - self.w.item(), 4)

    @property
    def rate(self) -> float:
        return float(self.opt.param_groups[0]["lr"])


@at_once("options", ENGINES)
def test_a_new_recover_ends_the_smaller_rate_of_the_one_before(options: dict[str, Any]) -> None:
    run = Slowed(**options)
    assert run.moved() == pytest.approx(0.05)
    again = run.watched()
    assert run.moved() == pytest.approx(0.1)
    assert run.rate == 0.1
    with pytest.raises(RuntimeError, match="replaced by a newer Recover of the same optimizer"):
        run.recover.step(1.0)
    assert again.step(1.0) is None


@at_once("options", ENGINES)
def test_remove_and_a_recover_that_is_gone_leave_no_hooks(options: dict[str, Any]) -> None:
    for gone in (False, True):
        run = Slowed(**options)
        if gone:
            held = weakref.ref(run.recover)
            del run.recover
            gc.collect()
            assert held() is None
        else:
            run.recover.remove()
        assert not run.opt._optimizer_step_pre_hooks
        assert not run.opt._optimizer_step_post_hooks
        assert run.moved() == pytest.approx(0.1)


def test_the_optimizer_of_a_handle_has_one_recover_as_well() -> None:
    model = nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attach(opt, ClipNorm(1.0))
    count = len(opt._optimizer_step_pre_hooks)
    first = Recover(handle, model, **OPTIONS)
    handle.remove()
    second = Recover(attach(opt, ClipNorm(1.0)), model, **OPTIONS)
    assert len(opt._optimizer_step_pre_hooks) == count + 1
    assert first is not second


class Broken(Exception):
    """What a closure raises."""


def failing() -> Tensor:
    raise Broken


@at_once("options", ENGINES)
def test_a_closure_that_raises_gives_the_rate_back_at_once(options: dict[str, Any]) -> None:
    run = Slowed(**options)
    for _ in range(3):
        for given in ((failing,), ()):
            with pytest.raises(Broken):
                run.opt.step(*given, **({} if given else {"closure": failing}))
            assert run.rate == 0.1
    assert run.moved(closure=lambda: torch.tensor(1.0)) == pytest.approx(0.05)
    assert run.rate == 0.1


def test_a_closure_that_raises_under_a_foreign_optimizer() -> None:
    model = nn.Linear(1, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    recover = Recover(attach(opt, ClipNorm(9.0)), model, **OPTIONS)
    for loss in (1.0, 1.0, math.nan, 1.0):
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
        recover.step(loss)
    for _ in range(2):
        with pytest.raises(Broken):
            opt.step(failing)
        assert opt.param_groups[0]["lr"] == 0.1


@at_once("options", ENGINES)
def test_another_error_in_a_step_does_not_make_the_rate_smaller_again(
    options: dict[str, Any],
) -> None:
    run = Slowed(**options)
    run.opt.param_groups[0]["betas"] = (0.9, 0.99)
    for _ in range(3):
        with pytest.raises(ValueError, match="betas"):
            run.moved()
    del run.opt.param_groups[0]["betas"]
    assert run.moved() == pytest.approx(0.05)
    assert run.rate == 0.1


def test_a_tensor_as_the_rate_comes_back_too() -> None:
    run = Slowed()
    rate = torch.tensor(0.1)
    run.opt.param_groups[0]["lr"] = rate
    assert run.moved() == pytest.approx(0.05)
    assert run.opt.param_groups[0]["lr"] is rate


def test_hooks_of_released_gradients_go_with_their_optimizer() -> None:
    model = nn.Linear(2, 2)
    opt = release(model, Adam(), LR(0.1))
    assert all([p._post_accumulate_grad_hooks for p in model.parameters()])
    del opt
    gc.collect()
    assert not any([p._post_accumulate_grad_hooks for p in model.parameters()])


def test_recover_on_two_optimizers_at_once() -> None:
    """Each optimizer has its own."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    opts = [Modular(part.parameters(), Guard(), LR(0.1)) for part in model]
    both = [Recover(opt, part, **OPTIONS) for opt, part in zip(opts, model, strict=True)]
    for recover in both:
        assert recover.step(1.0) is None
