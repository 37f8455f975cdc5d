"""`safe_to_save`: whether what an optimizer holds is worth a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once, param
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Group,
    Guard,
    Modular,
    SkipLarge,
    SkipSpike,
    State,
    TensorList,
    Transform,
    ZClip,
    attach,
)
from torchzero_clip.audit import Ledger, fake_cuda, twin

GUARDS: list[Callable[[], list[Transform]]] = [
    lambda: [Guard()],
    lambda: [SkipLarge(10.0)],
    lambda: [SkipSpike(), Guard()],
]


def step(p: Parameter, opt: Modular, grad: float) -> None:
    p.grad = torch.full_like(p, grad)
    opt.step()


@pytest.mark.parametrize("compile", [False, True])
@at_once("guards", GUARDS)
def test_it_looks_as_many_steps_back_as_it_is_asked(
    guards: Callable[[], list[Transform]], compile: bool
) -> None:
    p = param(1.0, 2.0)
    opt = Modular([p], *guards(), Adam(), LR(0.1), compile=compile)
    assert opt.safe_to_save(steps=100)  # nothing has been skipped
    step(p, opt, 1.0)
    assert opt.safe_to_save(steps=100)
    step(p, opt, math.inf)
    assert not opt.safe_to_save()
    assert opt.safe_to_save(steps=0)  # the numbers alone
    for n in range(1, 4):
        step(p, opt, 1.0)
        assert opt.safe_to_save(steps=n)
        assert not opt.safe_to_save(steps=n + 1)


def test_it_goes_on_counting_after_a_resume() -> None:
    p = param(1.0)
    opt = Modular([p], Guard(), Adam(), LR(0.1))
    for grad in (1.0, math.nan, 1.0):
        step(p, opt, grad)
    again = Modular([p], Guard(), Adam(), LR(0.1))
    again.load_state_dict(opt.state_dict())
    assert again.safe_to_save(steps=1)
    assert not again.safe_to_save(steps=2)


@at_once("value", [math.nan, math.inf, -math.inf])
def test_weights_and_state_must_be_finite(value: float) -> None:
    p = param(1.0, 2.0)
    opt = Modular([p], ZClip(), Adam(), LR(0.1))
    step(p, opt, 1.0)
    assert opt.safe_to_save()
    for held in (p.detach(), opt.state[p]["Adam/exp_avg"]):
        before = held.clone()
        held[1] = value
        assert not opt.safe_to_save()
        held.copy_(before)
        assert opt.safe_to_save()


@at_once("options", [{}, {"fused": False}, {"compile": True}])
def test_exact_weights_are_judged_in_float32(options: dict[str, bool]) -> None:
    """A finite number above the largest of bfloat16 shows as infinity in the parameter."""
    p = Parameter(torch.tensor([3.38e38, 1.0]).bfloat16())
    opt = Modular([p], LR(1.0), rounding="exact", **options)
    p.grad = torch.tensor([-2e36, 0.0]).bfloat16()
    opt.step()
    assert p[0].item() == math.inf
    assert opt.safe_to_save()
    with torch.no_grad():
        p[1] = math.nan
    assert not opt.safe_to_save()
    with torch.no_grad():
        p[1] = math.inf
    assert not opt.safe_to_save()


class Since(Transform):
    """A rule of a user's own with state that has the name of the count of guards."""

    def init(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"since": torch.zeros_like(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u


def test_only_the_counts_of_guards_are_counts() -> None:
    p = param(1.0, 2.0)
    opt = Modular([p], Since(), LR(0.1))
    step(p, opt, 1.0)
    assert opt.safe_to_save(steps=10)
    opt.state[p]["Since/since"].fill_(math.nan)
    assert not opt.safe_to_save()


def test_an_empty_window_is_no_poison() -> None:
    opt = Modular([param(1.0)], SkipSpike(), LR(0.1))
    opt.init_state()
    assert opt.safe_to_save()


def test_a_handle_looks_at_the_state_of_its_optimizer() -> None:
    p = param(1.0)
    opt = torch.optim.Adam([p], lr=0.1)
    handle = attach(opt, ClipNorm(1.0))
    p.grad = torch.ones(1)
    opt.step()
    assert handle.safe_to_save()
    opt.state[p]["exp_avg_sq"].fill_(math.nan)
    assert not handle.safe_to_save()
    assert Clipper([p], ClipNorm(1.0)).safe_to_save()


@at_once("steps", [-1, 1.5, True, "10"])
def test_steps_are_a_number_of_steps(steps: object) -> None:
    with pytest.raises(ValueError, match="steps must be an integer of at least 0, got"):
        Modular([param(1.0)], LR(0.1)).safe_to_save(steps)  # type: ignore[arg-type]


def test_it_waits_for_the_device_once() -> None:
    with fake_cuda():
        params = twin([param(1.0, 2.0), param(3.0)])
        opt = Modular(params, Guard(), SkipSpike(), Adam(), LR(0.1))
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        with Ledger() as ledger:
            opt.safe_to_save(steps=3)
    assert len(ledger.of("read", "copy")) == 1
