"""Weights for evaluation behind the step of any optimizer: `attach(optimizer, after=...)`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.helpers import close, network, same
from torchzero_clip import (
    LR,
    Chain,
    ClipNorm,
    Group,
    Live,
    Lookahead,
    Modular,
    Momentum,
    ScheduleFree,
    State,
    TensorList,
    Transform,
    WeightAverage,
    WeightDecay,
    WeightEMA,
    attach,
)

INPUTS = torch.linspace(-1, 1, 64).view(-1, 4)
LINKS = [WeightEMA(0.5), WeightAverage(), Lookahead(2), Chain(Lookahead(2), WeightEMA(0.5))]
each_link = pytest.mark.parametrize("link", LINKS, ids=repr)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model: nn.Module, opt: Any, steps: int = 4) -> None:
    for _ in range(steps):
        opt.zero_grad()
        (model(INPUTS) - INPUTS.sum(1, keepdim=True)).square().mean().backward()
        opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@each_link
def test_behind_an_optimizer_averages_are_those_of_a_chain(link):
    model, other = network(), network()
    opt = sgd(model)
    handle = attach(opt, after=link)
    links = link if isinstance(link, Chain) else [link]
    chain = Modular(other.parameters(), Momentum(0.9), LR(0.1), *links)
    train(model, opt, 7)
    train(other, chain, 7)
    close(weights(model), weights(other))
    found = handle.averaged_state_dict(model)
    close(dict(found), dict(chain.averaged_state_dict(other)))
    before = weights(model)
    with handle.averaged():
        close(weights(model), list(found.values()))
        with pytest.raises(
            RuntimeError, match=r"step\(\) is not allowed in the with block of averaged\(\)"
        ):
            opt.step()
    same(weights(model), before)
    handle.eval()
    with pytest.raises(
        RuntimeError, match=r"step\(\) is not allowed between eval\(\) and train\(\)"
    ):
        opt.step()
    handle.train()
    same(weights(model), before)


@each_link
def test_compiled_it_is_one_kernel_and_a_step_of_it_is_repeated(link):
    model, other = network(), network()
    optimizers = sgd(model), sgd(other)
    handle = attach(optimizers[0], after=link, compile=True)
    plain = attach(optimizers[1], after=link)
    last = list(model.parameters())[-1]
    for late in (False, True):
        last.requires_grad_(late)  # a parameter that joins
        list(other.parameters())[-1].requires_grad_(late)
        for one, opt in zip((model, other), optimizers, strict=True):
            train(one, opt, 6)
        engine = handle.after.engine
        assert engine.replays.count > 0, engine.replays.why
        assert engine.says([])[1:] == ["A replayed step is 1 call of compiled code."]
        close(weights(model), weights(other))
        found = handle.averaged_state_dict(model), plain.averaged_state_dict(other)
        close(*[dict(x) for x in found])
        with handle.averaged():  # which leaves the addresses as they are
            pass


@each_link
def test_complex_parameters_have_averages_compiled_or_not(link):
    found = []
    for compile in (False, True):
        p = Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        opt = torch.optim.SGD([p], 0.1)
        handle = attach(opt, after=link, compile=compile)
        for i in range(5):
            p.grad = torch.tensor([1j, i + 0j])
            opt.step()
        with handle.averaged():
            found.append(p.detach().clone())
    close(*found)


def test_compiled_zero_is_no_pass_over_gradients():
    """A kernel reads weights and average, writes the average, and sees no gradient."""
    handle = attach(sgd(network()), after=WeightEMA(0.5), compile=True)
    launches: list[Any] = []
    engine, run = handle.after.engine, type(handle.after.engine)._run
    engine._run = lambda launch: launches.append(launch) or run(engine, launch)
    p = next(iter(handle.param_groups[0]["params"]))
    p.grad = torch.full_like(p, torch.nan)
    handle.after.begin()
    handle.after.look()
    (launch,) = launches
    moved = [sum([t.numel() for t in row]) for row in (launch.read, launch.written)]
    assert moved == [2 * p.numel(), p.numel()]
    assert handle.after.state[p]["WeightEMA/ema"].equal(p)


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_a_resumed_run_goes_on_with_its_average(in_checkpoint):
    model = network()
    opt = sgd(model)
    handle = attach(opt, ClipNorm(0.1), after=WeightEMA(0.5), in_checkpoint=in_checkpoint)
    train(model, opt)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), handle.state_dict()))
    train(model, opt)
    other = network()
    resumed = sgd(other)
    again = attach(resumed, ClipNorm(0.1), after=WeightEMA(0.5), in_checkpoint=in_checkpoint)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    if not in_checkpoint:
        again.load_state_dict(saved[2])
    train(other, resumed)
    same(dict(again.averaged_state_dict(other)), dict(handle.averaged_state_dict(model)))


def test_checkpoints_with_and_without_such_links_are_told_apart():
    model = network()
    plain = attach(sgd(model), ClipNorm(0.1))
    behind = attach(sgd(model), ClipNorm(0.1), after=WeightEMA(0.5))
    message = r"lacks the state of averaged weights, but .* save handle\.state_dict"
    with pytest.raises(ValueError, match=message):
        behind.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"has the state of averaged weights, but"):
        plain.load_state_dict(behind.state_dict())


def test_groups_that_are_added_are_averaged_as_well():
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], 1.0)
    handle = attach(opt, after=WeightEMA(0.5))
    opt.add_param_group({"params": [q]})
    for _ in range(2):
        p.grad, q.grad = torch.full((1,), -1.0), torch.full((1,), -2.0)
        opt.step()
    with handle.averaged():
        close([p.detach(), q.detach()], [torch.tensor([1.5]), torch.tensor([3.0])])


def test_the_plan_tells_of_links_behind_the_optimizer():
    handle = attach(sgd(network()), after=WeightEMA(0.5))
    said = (
        "After each step of the optimizer, Chain(WeightEMA(decay=0.5)) averages the weights. Use "
        "averaged() to evaluate with the averaged weights."
    )
    assert handle.explain().splitlines()[-1] == said


def test_a_checkpoint_that_does_not_fit_changes_no_average():
    params, opt = two_groups({})
    handle = attach(opt, ClipNorm(1.0), after=WeightEMA(0.5))
    step_down(opt, params)
    saved = copy.deepcopy(handle.state_dict())
    other_params, other = two_groups({})
    again = attach(other, after=WeightEMA(0.5))
    for _ in range(2):
        step_down(other, other_params)
    before = averages_of(again, other_params)
    with pytest.raises(ValueError, match="saved with different transforms"):
        again.load_state_dict(saved)
    assert averages_of(again, other_params) == before


def two_groups(second: dict[str, Any]) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """Return two parameters and SGD, with one group for each and keys for the second group."""
    params = [Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], **second}]
    return params, torch.optim.SGD(groups, lr=1.0)


def step_down(opt: torch.optim.Optimizer, params: list[Parameter]) -> None:
    """Step with gradients of 1."""
    for p in params:
        p.grad = torch.ones(1)
    opt.step()


def averages_of(handle: Any, params: list[Parameter]) -> list[float]:
    with handle.averaged():
        return [p.item() for p in params]


@pytest.mark.parametrize("compile", [False, True])
def test_hyperparameters_of_links_after_the_step_are_in_the_groups_of_the_handle(compile):
    params, opt = two_groups({"decay": 0.0})
    handle = attach(opt, ClipNorm(0.5), after=WeightEMA(0.5), compile=compile)
    assert [group["decay"] for group in handle.param_groups] == [0.5, 0.0]
    for _ in range(2):
        step_down(opt, params)
    assert averages_of(handle, params) == [-0.75, -1.0]
    handle.param_groups[0]["decay"] = 0.0
    handle.param_groups[1]["WeightEMA/decay"] = 0.5
    for _ in range(2):
        step_down(opt, params)
    assert averages_of(handle, params) == [-2.0, -1.625]
    handle.param_groups[0]["decay"] = 2.0
    with pytest.raises(ValueError, match="WeightEMA: decay must be"):
        step_down(opt, params)


def test_hyperparameters_of_links_after_the_step_are_saved_and_loaded():
    params, opt = two_groups({})
    handle = attach(opt, after=WeightEMA(0.5))
    handle.param_groups[1]["decay"] = 0.25
    step_down(opt, params)
    saved = copy.deepcopy(handle.state_dict())
    new_params, new = two_groups({})
    for old_param, new_param in zip(params, new_params, strict=True):
        new_param.data.copy_(old_param.data)
    again = attach(new, after=WeightEMA(0.5))
    with pytest.warns(UserWarning, match="group 1: decay: 0.25 from the checkpoint") as warned:
        again.load_state_dict(saved)
    assert len(warned) == 1
    assert [group["decay"] for group in again.param_groups] == [0.5, 0.25]
    step_down(new, new_params)
    assert averages_of(again, new_params) == [-1.5, -1.75]
    again.param_groups[1]["decay"] = 0.0
    again.load_state_dict(saved, keep="decay")
    step_down(new, new_params)
    assert averages_of(again, new_params)[1] == -3.0


def test_names_that_links_before_and_after_the_step_share_need_a_path():
    class Mixed(Transform):
        """u ← decay · u"""

        decay: Live[float] = 1.0

        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            return u.mul(group["decay"])

    _, opt = two_groups({"decay": 0.0})
    with pytest.raises(ValueError, match=r"use one of \['Mixed/decay', 'WeightEMA/decay'\]"):
        attach(opt, Mixed(), after=WeightEMA(0.5))
    params, opt = two_groups({"WeightEMA/decay": 0.0})
    handle = attach(opt, Mixed(), after=WeightEMA(0.5))
    handle.param_groups[0]["Mixed/decay"] = 2.0
    step_down(opt, params)
    step_down(opt, params)
    assert averages_of(handle, params) == [-3.0, -2.0]


@pytest.mark.parametrize("before", [[], [ClipNorm(1.0)]])
def test_misspelled_hyperparameters_of_links_after_the_step_are_refused(before):
    _, opt = two_groups({"decayy": 0.0})
    with pytest.raises(ValueError, match=r"unknown key 'decayy' .* did you mean 'decay'"):
        attach(opt, *before, after=WeightEMA(0.5))
    _, opt = two_groups({"every": 5})
    with pytest.raises(ValueError, match="the argument every of WeightEMA is fixed"):
        attach(opt, *before, after=WeightEMA(0.5))


def test_the_plan_reports_unread_hyperparameters_of_links_after_the_step():
    _, opt = two_groups({})
    handle = attach(opt, after=WeightEMA(0.5))
    opt.param_groups[1]["decay"] = 0.0
    assert "set handle.param_groups[1]['decay']" in handle.explain()


def test_a_removed_handle_looks_no_more():
    model = network()
    opt = sgd(model)
    with attach(opt, after=WeightEMA(0.5)) as handle:
        train(model, opt)
    held = handle.averaged_state_dict(model)
    train(model, opt)
    same(dict(handle.averaged_state_dict(model)), dict(held))


@pytest.mark.parametrize("link", [ScheduleFree(), WeightDecay(0.1), LR(0.1), Chain(ScheduleFree())])
def test_a_link_that_needs_the_step_is_refused(link: Transform):
    with pytest.raises(ValueError, match="after= accepts only transforms that average"):
        attach(sgd(network()), after=link)


def test_what_is_no_link_is_refused():
    with pytest.raises(TypeError, match=r"after= must be a Transform or a Chain, got 0.999"):
        attach(sgd(network()), after=0.999)  # type: ignore[arg-type]


def test_a_handle_without_such_a_link_says_how_to_have_one():
    handle = attach(sgd(network()), ClipNorm(1.0))
    handle.eval()
    handle.train()
    with pytest.raises(ValueError, match=r"attach\(optimizer, after=WeightEMA\(0.999\)\)"):
        handle.averaged()


def test_a_step_that_a_scaler_skips_moves_no_average():
    model = network()
    opt = sgd(model)
    handle = attach(opt, after=WeightEMA(0.5))
    train(model, opt)
    scaler = torch.amp.GradScaler("cpu")
    before = dict(handle.averaged_state_dict(model))
    opt.zero_grad()
    scaler.scale(model(INPUTS).sum() * float("inf")).backward()
    scaler.step(opt)
    scaler.update()
    same(dict(handle.averaged_state_dict(model)), before)
