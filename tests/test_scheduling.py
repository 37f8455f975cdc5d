"""schedule: what torch's schedulers do to lr, and functions of the step, for any number."""

from __future__ import annotations

import io
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.helpers import network
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Clipper,
    Masked,
    Modular,
    Momentum,
    ZClip,
    attach,
    schedule,
)


def two_groups(*links: Any, **second: Any) -> Modular:
    first, last = network()[0], network()[2]
    return Modular(
        [{"params": first.parameters()}, {"params": last.parameters(), **second}], *links
    )


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def clipping(value: Any = 1.0) -> Modular:
    return Modular(network().parameters(), ClipNorm(value), LR(0.1))


# ---------------------------------------------------------------------- functions of the step


def test_a_function_gives_the_value_of_each_step_from_0_on() -> None:
    opt = clipping()
    limit = schedule(opt, "max_norm", lambda step: 1.0 + 9.0 * 0.5**step)
    for step in range(5):
        assert opt.param_groups[0]["max_norm"] == 1.0 + 9.0 * 0.5**step
        assert limit.last_value == [opt.param_groups[0]["max_norm"]]
        limit.step()


@pytest.mark.parametrize("start", [0, 1])
def test_a_function_that_seems_to_give_factors_of_the_learning_rate_warns_once(start: int) -> None:
    opt = Modular([torch.nn.Parameter(torch.ones(2))], Adam(), LR(1e-3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rate = schedule(opt, "lr", lambda step: min(1.0, start + step / 4))
        for _ in range(5):
            opt.step()
            rate.step()
    (said,) = [str(warning.message) for warning in caught]
    assert "'lr' returned " in said
    assert (
        "but the value in the parameter group was 0.001: the function must return the new value"
        in said
    )
    opt.param_groups[0]["lr"] = 1e-3
    schedule(opt, "lr", lambda step: 1e-3 * min(1.0, step / 4)).step()
    schedule(opt, "eps", lambda step: 1.0)


def test_the_rule_acts_on_the_value() -> None:
    """The gradient (3, 4) has norm 5 and is clipped to what the function says."""
    w = torch.nn.Parameter(torch.zeros(2))
    opt = Modular([w], ClipNorm(100.0), LR(1.0))
    limit = schedule(opt, "max_norm", lambda step: [2.5, 1.0, 7.0][step])
    moved = []
    for _ in range(3):
        before = w.detach().clone()
        w.grad = torch.tensor([3.0, 4.0])
        opt.step()
        moved.append((before - w.detach()).norm().item())
        if len(moved) < 3:
            limit.step()
    assert moved == pytest.approx([2.5, 1.0, 5.0])


def test_a_list_has_a_function_for_each_group() -> None:
    opt = two_groups(ClipNorm(1.0), LR(0.1))
    limit = schedule(opt, "max_norm", [lambda step: 1.0 + step, lambda step: 10.0 - step])
    limit.step()
    assert [group["max_norm"] for group in opt.param_groups] == [2.0, 9.0]


def test_one_function_goes_for_all_groups_and_for_those_that_come_later() -> None:
    opt = two_groups(ClipNorm(1.0), LR(0.1), max_norm=5.0)
    limit = schedule(opt, "max_norm", lambda step: 3.0 + step)
    assert [group["max_norm"] for group in opt.param_groups] == [3.0, 3.0]
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "max_norm": 8.0})
    limit.step()
    assert [group["max_norm"] for group in opt.param_groups] == [4.0, 4.0, 4.0]


@pytest.mark.parametrize("how", [[lambda step: 1.0], partial(lr_scheduler.StepLR, step_size=2)])
def test_what_was_made_for_each_group_says_so_when_one_is_added(how: Any) -> None:
    opt = clipping()
    limit = schedule(opt, "max_norm", how)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="has 2 parameter groups, but had 1 when the schedule"):
        limit.step()


def test_a_function_may_give_a_tuple() -> None:
    opt = Modular(network().parameters(), Adam(), LR(0.1))
    betas = schedule(opt, "betas", lambda step: [0.9, 1 - 1 / (step + 2)])
    betas.step()
    assert opt.param_groups[0]["betas"] == (0.9, 1 - 1 / 3)


def test_index_changes_one_entry_of_a_tuple() -> None:
    opt = torch.optim.Adam(network().parameters(), betas=(0.8, 0.99))
    first = schedule(opt, "betas", lambda step: 0.5 + step / 10, index=0)
    first.step()
    assert opt.param_groups[0]["betas"] == (0.6, 0.99)
    assert first.last_value == [0.6]


def test_torchs_schedulers_change_one_entry_too() -> None:
    opt = torch.optim.Adam(network().parameters(), betas=(0.8, 0.5))
    beta = schedule(opt, "betas", partial(lr_scheduler.ExponentialLR, gamma=0.5), index=-1)
    beta.step()
    assert opt.param_groups[0]["betas"] == (0.8, 0.25)


def test_the_long_name_chooses_the_link() -> None:
    opt = Modular(network().parameters(), ClipNorm(1.0), LR(1.0), ClipNorm(2.0))
    schedule(opt, "ClipNorm_2/max_norm", lambda step: 7.0)
    assert opt.param_groups[0]["ClipNorm/max_norm"] == 1.0
    assert opt.param_groups[0]["ClipNorm_2/max_norm"] == 7.0


def test_the_long_name_is_accepted_where_the_short_one_is_in_use() -> None:
    opt = Modular(network().parameters(), Masked(ClipNorm(1.0), lambda name, p: True), LR(1.0))
    limit = schedule(opt, "Masked/ClipNorm/max_norm", lambda step: 7.0)
    assert (limit.key, opt.param_groups[0]["max_norm"]) == ("max_norm", 7.0)


def test_an_optimizer_of_torch_will_do() -> None:
    opt = torch.optim.AdamW(network().parameters(), weight_decay=0.1)
    decay = schedule(opt, "weight_decay", lambda step: 0.1 / (1 + step))
    decay.step()
    assert opt.param_groups[0]["weight_decay"] == 0.05


def test_a_clipper_and_a_handle_will_do() -> None:
    net = network()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for held in (Clipper(net.parameters(), ZClip()), attach(opt, ZClip())):
        thresh = schedule(held, "z_thresh", lambda step: 3.0 - step)
        thresh.step()
        assert held.param_groups[0]["z_thresh"] == 2.0


def test_a_group_that_joins_a_handle_is_followed() -> None:
    opt = torch.optim.SGD(network().parameters(), lr=0.1)
    handle = attach(opt, ClipNorm(1.0))
    limit = schedule(handle, "max_norm", lambda step: 3.0 + step)
    w = torch.nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [w]})
    w.grad = torch.ones(2)
    opt.step()
    limit.step()
    assert [group["max_norm"] for group in handle.param_groups] == [4.0, 4.0]


# ---------------------------------------------------------------------- numbers and tensors


def test_tensors_are_filled_in_place_and_not_replaced() -> None:
    held, beta = torch.tensor(1.0), torch.tensor(0.5)
    opt = torch.optim.Adam(network().parameters(), lr=held, betas=(0.5, 0.9))
    rate = schedule(opt, "lr", lambda step: 0.25 * (step + 1))
    rate.step()
    assert opt.param_groups[0]["lr"] is held
    assert held.item() == 0.5
    opt.param_groups[0]["betas"] = (beta, torch.tensor(0.9))
    schedule(opt, "betas", lambda step: (torch.tensor(0.75), 0.5))
    assert opt.param_groups[0]["betas"][0] is beta
    assert beta.item() == 0.75


def test_last_value_is_a_copy() -> None:
    opt = clipping(torch.tensor(1.0))
    limit = schedule(opt, "max_norm", lambda step: 2.0)
    limit.last_value[0].fill_(9.0)
    assert limit.last_value == [2.0]


@pytest.mark.parametrize("number", [2, torch.tensor(2.0), torch.tensor([2.0]).numpy()[0]])
def test_a_number_stays_a_float_whatever_the_function_gives(number: Any) -> None:
    opt = clipping()
    schedule(opt, "max_norm", lambda step: number)
    assert type(opt.param_groups[0]["max_norm"]) is float
    assert opt.param_groups[0]["max_norm"] == 2.0


# ---------------------------------------------------------------------- torch's schedulers

MADE = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=15),
    "OneCycleLR, a list": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=15),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.001, 5),
}


def one_step(scheduler: Any, name: str) -> None:
    scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()


@pytest.mark.parametrize("tensors", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", MADE)
def test_every_scheduler_does_to_any_key_what_it_does_to_lr(name: str, tensors: bool) -> None:
    """Bit for bit, with a group that has a value of its own, and across a save in the middle."""

    def value(x: float) -> Any:
        return torch.tensor(x) if tensors else x

    def ours() -> tuple[Modular, Any]:
        opt = two_groups(ClipNorm(value(0.5)), max_norm=value(0.2))
        return opt, schedule(opt, "max_norm", scheduler=MADE[name])

    w = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    sgd = torch.optim.SGD(
        [{"params": w[:1]}, {"params": w[1:], "lr": value(0.2)}], lr=value(0.5), momentum=0.9
    )
    theirs = MADE[name](sgd)
    opt, limit = ours()
    seen = set()
    for step in range(12):
        expected = [group["lr"] for group in sgd.param_groups]
        assert limit.last_value == expected
        seen.add(str(expected))
        sgd.step()
        one_step(theirs, name)
        one_step(limit, name)
        if step == 5:
            saved = through_a_file([opt.state_dict(), limit.state_dict()])
            opt, limit = ours()
            opt.load_state_dict(saved[0])
            limit.load_state_dict(saved[1])
    assert len(seen) > 1


def test_a_class_of_torch_is_driven_and_so_is_a_partial() -> None:
    opt = clipping(4.0)
    limit = schedule(opt, "max_norm", partial(lr_scheduler.ExponentialLR, gamma=0.5))
    limit.step()
    assert limit.last_value == [2.0]

    class Halved(lr_scheduler.ExponentialLR):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer, 0.5)

    limit = schedule(opt, "max_norm", Halved)
    limit.step()
    assert limit.last_value == [1.0]


def test_nothing_but_the_key_changes() -> None:
    """OneCycleLR would cycle the momentum of an optimizer that has one."""
    opt = Modular(network().parameters(), ClipNorm(1.0), Momentum(0.9), LR(0.1))
    before = {k: v for k, v in opt.param_groups[0].items() if k not in ("params", "max_norm")}
    limit = schedule(opt, "max_norm", partial(lr_scheduler.OneCycleLR, max_lr=5.0, total_steps=9))
    limit.step()
    after = {k: v for k, v in opt.param_groups[0].items() if k not in ("params", "max_norm")}
    assert before == after


def test_a_value_set_by_hand_is_what_a_chainable_scheduler_goes_on_from() -> None:
    opt = clipping(4.0)
    limit = schedule(opt, "max_norm", partial(lr_scheduler.ExponentialLR, gamma=0.5))
    opt.param_groups[0]["max_norm"] = 100.0
    limit.step()
    assert limit.last_value == [50.0]


# ---------------------------------------------------------------------- saving and loading


class Training:
    """A model, its chain, two schedules of ours and one of torch's."""

    def __init__(self, how: Any, tensor: bool) -> None:
        self.net = network()
        limit = torch.tensor(4.0) if tensor else 4.0
        chain = Chain(ClipNorm(limit, dim="global"), ZClip(), Adam(), LR(0.05))
        self.opt = Modular(self.net.parameters(), chain)
        self.parts = {
            "lr": lr_scheduler.CosineAnnealingLR(self.opt, 20),
            "limit": schedule(self.opt, "ClipNorm/max_norm", how),
            "beta": schedule(self.opt, "betas", lambda step: 0.9 - step / 100, index=0),
        }

    def run(self, steps: range) -> Training:
        for step in steps:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            self.opt.zero_grad()
            (self.net(x) - x.sum(1, keepdim=True)).square().mean().backward()
            self.opt.step()
            for part in self.parts.values():
                part.step()
        return self


HOW = {
    "function": lambda step: 0.1 + 4.0 * 0.9**step,
    "torch": partial(lr_scheduler.CosineAnnealingLR, T_max=20, eta_min=0.1),
}


@pytest.mark.parametrize(
    "tensor", [pytest.param(False, marks=pytest.mark.slow), True], ids=["float", "tensor"]
)
@pytest.mark.parametrize("order", [["opt", "parts"], ["parts", "opt"]], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_a_resumed_run_is_the_run_that_went_on(how: str, order: list[str], tensor: bool) -> None:
    whole = Training(HOW[how], tensor).run(range(16))
    first = Training(HOW[how], tensor).run(range(7))
    saved = through_a_file(
        {
            "net": first.net.state_dict(),
            "opt": first.opt.state_dict(),
            "parts": {name: part.state_dict() for name, part in first.parts.items()},
        }
    )
    second = Training(HOW[how], tensor)
    second.net.load_state_dict(saved["net"])
    for what in order:
        if what == "opt":
            second.opt.load_state_dict(saved["opt"])
        else:
            for name, part in second.parts.items():
                part.load_state_dict(saved["parts"][name])
    second.run(range(7, 16))
    for p, q in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        assert torch.equal(p, q)
    for name in ("limit", "beta"):
        assert whole.parts[name].last_value == second.parts[name].last_value
    assert whole.parts["limit"].last_value != Training(HOW[how], tensor).parts["limit"].last_value


@pytest.mark.filterwarnings("ignore:.* from the checkpoint replaces")
def test_loading_sets_the_values_even_where_the_optimizer_loaded_before_it_was_made() -> None:
    opt = clipping()
    limit = schedule(opt, "max_norm", lambda step: 3.0 + step)
    limit.step()
    again = clipping()
    again.load_state_dict(opt.state_dict())
    resumed = schedule(again, "max_norm", lambda step: 3.0 + step)  # back at step 0
    resumed.load_state_dict(limit.state_dict())
    assert again.param_groups[0]["max_norm"] == 4.0


def test_what_is_no_state_of_a_schedule_is_an_error() -> None:
    opt = clipping()
    limit = schedule(opt, "max_norm", lambda step: 3.0 + step)
    for state in ({}, opt.state_dict(), "run.pt"):
        with pytest.raises(
            ValueError, match=r"needs the result of a schedule's state_dict\(\), .* got "
        ):
            limit.load_state_dict(state)  # type: ignore[arg-type]


def test_a_value_set_by_hand_survives_saving() -> None:
    opt = clipping()
    limit = schedule(opt, "max_norm", lambda step: 3.0 + step)
    opt.param_groups[0]["max_norm"] = 100.0
    limit.load_state_dict(through_a_file(limit.state_dict()))
    assert limit.last_value == [100.0]


def test_the_values_of_another_number_of_groups_are_refused() -> None:
    saved = schedule(clipping(), "max_norm", lambda step: 1.0).state_dict()
    limit = schedule(two_groups(ClipNorm(1.0)), "max_norm", lambda step: 1.0)
    with pytest.raises(ValueError, match="values of 'max_norm' for 1 parameter group, but"):
        limit.load_state_dict(saved)


# ---------------------------------------------------------------------- mistakes


def one(step: int) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("key", "how", "sentence"),
    [
        ("max_nrom", one, "no key 'max_nrom': did you mean 'max_norm'?"),
        ("weight_decay", one, r"no transform uses 'weight_decay': add WeightDecay\(...\)"),
        ("temperature", one, r"no key 'temperature': the keys are \['tag', 'max_norm'"),
        ("chain", one, "no key 'chain'"),
        (
            "betas",
            lambda step: 0.9,
            "returned 0.9 at step 0, but 2 numbers are required",
        ),
        ("betas", partial(lr_scheduler.LambdaLR, lr_lambda=one), "select one with index="),
        (
            "max_norm",
            lambda step: None,
            "returned None at step 0, but a number is required",
        ),
        (
            "max_norm",
            lambda step: True,
            "returned True at step 0, but a number is required",
        ),
        (
            "max_norm",
            lambda step: -1.0,
            "ClipNorm: max_norm must be a number of at least 0, got -1.0",
        ),
        ("max_norm", 3.0, "must be a function of the step, .* got 3.0"),
        ("max_norm", [one, one], "2 functions for 1 parameter group:"),
        ("max_norm", None, "either value= or scheduler=, and not both"),
        ("tag", one, "tag must be a number, .* is 'encoder'"),
    ],
)
def test_a_mistake_gets_a_sentence(key: str, how: Any, sentence: str) -> None:
    params = [{"params": network().parameters(), "tag": "encoder"}]
    opt = Modular(params, ClipNorm(1.0), Adam(), LR(0.1))
    with pytest.raises((TypeError, ValueError), match=sentence):
        schedule(opt, key, how)


def test_an_invalid_value_leaves_all_groups_as_they_were() -> None:
    opt = two_groups(Adam(), LR(0.1))
    rates = [lambda step: 0.5 + step, lambda step: 0.5 - step]
    with pytest.raises(ValueError, match=r"lr must be a finite number of at least 0, got -1"):
        schedule(opt, "lr", [lambda step: 2.0, lambda step: -1.0])
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.1]
    later = schedule(opt, "lr", rates)
    with pytest.raises(ValueError, match=r"lr must be a finite number of at least 0, got -0.5"):
        later.step()
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.5]


def test_a_mistake_that_comes_later_gets_one_too() -> None:
    limit = schedule(clipping(), "max_norm", lambda step: 1.0 - step)
    limit.step()
    with pytest.raises(
        ValueError, match="ClipNorm: max_norm must be a number of at least 0, got -1"
    ):
        limit.step()


def test_the_other_mistakes() -> None:
    opt = Modular(network().parameters(), ClipNorm(1.0), ClipNorm(2.0), Adam(), LR(0.1))
    with pytest.raises(ValueError, match=r"is ambiguous, .*: use one of .*'ClipNorm_2/max_norm'"):
        schedule(opt, "max_norm", one)
    with pytest.raises(ValueError, match="did you mean 'ClipNorm_2/max_norm'"):
        schedule(opt, "ClipNorm_2/max_nrm", one)
    with pytest.raises(TypeError, match=r"betas\[2\] must be a number"):
        schedule(opt, "betas", one, index=2)
    with pytest.raises(TypeError, match=r"eps\[0\] must be a number"):
        schedule(opt, "eps", one, index=0)
    with pytest.raises(
        TypeError, match=r"scheduler= must return a torch scheduler, but returned 1\.0"
    ):
        schedule(opt, "eps", scheduler=lambda o: 1.0)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Linear"):
        schedule(torch.nn.Linear(1, 1), "eps", one)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="either value= or scheduler=, and not both"):
        schedule(opt, "eps", one, scheduler=lr_scheduler.ExponentialLR)
    adam = torch.optim.Adam(network().parameters())
    with pytest.raises(ValueError, match="did you mean 'weight_decay'"):
        schedule(adam, "weight_dacay", one)
    with pytest.raises(TypeError, match="amsgrad must be a number"):
        schedule(adam, "amsgrad", one)


def test_a_limit_may_be_infinite() -> None:
    opt = clipping()
    schedule(opt, "max_norm", lambda step: math.inf)
    assert opt.param_groups[0]["max_norm"] == math.inf


def test_it_says_what_it_is() -> None:
    assert repr(schedule(clipping(), "max_norm", one)) == "Schedule(max_norm: [1.0])"
