"""The formulas of weights for evaluation, by hand and against what torch has."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from tests.helpers import close, network, same
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Guard,
    Lion,
    Lookahead,
    Modular,
    Momentum,
    Partition,
    ScheduleFree,
    Transform,
    WeightAverage,
    WeightDecay,
    WeightEMA,
)


def stepped(
    w: float, grads: list[float], *chain: Transform, lrs: Any = ()
) -> tuple[list[float], ...]:
    """The weight, and its weights for evaluation, after each of these gradients."""
    p = Parameter(torch.tensor([w], dtype=torch.float64))
    opt = Modular([p], *chain)
    weights, averages = [], []
    for i, grad in enumerate(grads):
        p.grad = torch.tensor([grad], dtype=torch.float64)
        if lrs:
            opt.param_groups[0]["lr"] = lrs[i]
        opt.step()
        weights.append(p.item())
        with opt.averaged():
            averages.append(p.item())
        assert p.item() == weights[-1]
    return weights, averages


def about(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-12, abs=1e-12)


# ---------------------------------------------------------------------- WeightEMA


def test_the_average_begins_at_the_first_weights_and_follows_by_a_share():
    weights, averages = stepped(0.0, [-1.0, -1.0, -2.0], LR(1.0), WeightEMA(0.5))
    assert weights == about(1, 2, 4)
    assert averages == about(1, 1.5, 2.75)


def test_every_other_step_moves_the_average():
    _, averages = stepped(0.0, [-1.0] * 5, LR(1.0), WeightEMA(0.5, every=2))
    assert averages == about(1, 1, 2, 2, 3.5)


def test_the_decay_grows_in_the_warm_up():
    _, averages = stepped(0.0, [-1.0] * 3, LR(1.0), WeightEMA(0.999, warmup=True))
    second = 1 * 2 / 11 + 2 * 9 / 11
    assert averages == about(1, second, second * 3 / 12 + 3 * 9 / 12)


def test_a_small_decay_is_not_raised_by_the_warm_up():
    _, averages = stepped(0.0, [-1.0] * 2, LR(1.0), WeightEMA(0.1, warmup=True))
    assert averages == about(1, 1.9)


def followed(
    link: Transform, other: Any, steps: int = 9, dtype: torch.dtype = torch.float64
) -> None:
    """Train one network with the link, and hold its weights for evaluation against torch's."""
    model = network().to(dtype)
    theirs = AveragedModel(model, multi_avg_fn=other)
    opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), WeightDecay(0.1), LR(0.1), link)
    x = torch.linspace(-1, 1, 64, dtype=dtype).view(-1, 4)
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        theirs.update_parameters(model)
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    close(opt.averaged_state_dict(model), theirs.module.state_dict(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ema_is_that_of_torch(dtype):
    followed(WeightEMA(0.9), get_ema_multi_avg_fn(0.9), dtype=dtype)


def test_the_mean_is_that_of_torch():
    followed(WeightAverage(), get_swa_multi_avg_fn(), dtype=torch.float32)


def test_the_mean_is_exact_in_double_precision_where_the_share_of_torch_is_a_float32():
    grads = [math.sin(i) for i in range(1, 40)]
    weights, averages = stepped(0.3, grads, LR(0.1), WeightAverage())
    assert averages == about(*[math.fsum(weights[:n]) / n for n in range(1, len(weights) + 1)])


def test_half_precision_keeps_its_average_in_float32():
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = Modular([p], LR(1.0), WeightEMA(0.999))
    for _ in range(50):
        p.grad = torch.full((3,), -0.0078125, dtype=torch.bfloat16)
        opt.step()
    ema = opt.state[p]["WeightEMA/ema"]
    assert ema.dtype == torch.float32
    moved = ema - 1
    assert (moved > 0.0078125).all()  # what bfloat16 would have rounded away at each step


# ---------------------------------------------------------------------- WeightAverage


def test_the_mean_counts_from_its_start_in_every_second_step():
    weights, averages = stepped(0.0, [-1.0] * 6, LR(1.0), WeightAverage(start=2, every=2))
    assert weights == about(1, 2, 3, 4, 5, 6)
    assert averages == about(1, 2, 3, 3, 4, 4)


# ---------------------------------------------------------------------- Lookahead


def test_lookahead_draws_the_weights_back_to_the_slow_ones():
    weights, averages = stepped(0.0, [-1.0] * 4, LR(1.0), Lookahead(2, alpha=0.5))
    assert weights == about(1, 1, 2, 2)
    assert averages == about(0, 1, 1, 2)


def test_the_first_sync_changes_nothing_where_slow_weights_begin_there():
    weights, averages = stepped(0.0, [-1.0] * 4, LR(1.0), Lookahead(2, alpha=0.5, start="sync"))
    assert weights == about(1, 2, 3, 3)
    assert averages == about(1, 2, 2, 3)


# ---------------------------------------------------------------------- ScheduleFree


def by_hand(
    w: float, grads: list[float], lrs: list[float], beta: float, r: float, power: float
) -> tuple[list[float], list[float]]:
    """Schedule-Free SGD as its paper writes it, with x itself kept."""
    x = z = y = w
    total = largest = 0.0
    ys, xs = [], []
    for t, (grad, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        z -= lr * grad
        largest = max(largest, lr)
        weight = t**r * largest**power
        total += weight
        c = weight / total if total else 0.0
        x = (1 - c) * x + c * z
        y = (1 - beta) * z + beta * x
        ys.append(y)
        xs.append(x)
    return ys, xs


@pytest.mark.parametrize(
    ("beta", "r", "power"), [(0.9, 0.0, 2.0), (0.5, 1.0, 0.0), (0.3, 0.5, 1.0)]
)
def test_schedule_free_is_its_paper(beta, r, power):
    grads = [1.0, -2.0, 0.5, 3.0, -1.0, 0.25]
    lrs = [0.0, 0.1, 0.2, 0.3, 0.3, 0.1]
    link = ScheduleFree(beta, r=r, weight_lr_power=power)
    weights, averages = stepped(2.0, grads, LR(0.0), link, lrs=lrs)
    ys, xs = by_hand(2.0, grads, lrs, beta, r, power)
    assert weights == about(*ys)
    assert averages == about(*xs)


def test_a_rate_of_zero_leaves_everything_where_it_is():
    weights, averages = stepped(2.0, [1.0, -1.0], LR(0.0), ScheduleFree())
    assert weights == averages == about(2, 2)


def test_the_first_weights_for_evaluation_are_those_of_the_first_step():
    weights, averages = stepped(2.0, [1.0], LR(0.5), ScheduleFree())
    assert weights == averages == about(1.5)


def test_schedule_free_needs_a_rate():
    with pytest.raises(ValueError, match="ScheduleFree reads lr, but no transform has lr"):
        Modular([Parameter(torch.ones(1))], Adam(), ScheduleFree())


def test_several_rates_before_it_are_refused():
    two = Partition({"a": Chain(Adam(), LR(0.1)), "b": Chain(Lion(), LR(0.2))}, lambda n, p: "a")
    with pytest.raises(ValueError, match="only one transform may have an lr, got"):
        Modular([Parameter(torch.ones(1))], two, ScheduleFree())


# ---------------------------------------------------------------------- places


@pytest.mark.parametrize(
    "chain",
    [
        (WeightEMA(), LR(0.1)),
        (LR(0.1), WeightEMA(), Lookahead()),
        (LR(0.1), ScheduleFree(), WeightDecay(0.1)),
        (Chain(WeightEMA(), name="inside"), LR(0.1)),
        (Partition({"a": WeightAverage()}, lambda n, p: "a"), LR(0.1)),
    ],
)
def test_a_link_behind_that_changes_the_step_is_refused(chain):
    with pytest.raises(ValueError, match="must come after all transforms that change the update"):
        Modular([Parameter(torch.ones(1))], *chain)


def test_averages_of_averages_stand_in_any_number():
    Modular([Parameter(torch.ones(1))], LR(0.1), Lookahead(), WeightEMA(), WeightAverage())


# ---------------------------------------------------------------------- guards


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "link",
    [WeightEMA(0.5), WeightAverage(), Lookahead(2), ScheduleFree()],
    ids=lambda link: type(link).__name__,
)
def test_a_skipped_step_moves_no_average_and_no_count(link, compile):
    runs = []
    for sick in (False, True):
        model = network()
        chain = Guard(), ClipNorm(1.0), Momentum(0.9), LR(0.1), link
        opt = Modular(model.parameters(), *chain, compile=compile)
        for i in range(6):
            for j, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, math.sin(i + j))
            if sick and i == 3:
                kept = copy.deepcopy(opt.state_dict()["state"])
                before = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.grad = torch.full_like(p, math.nan)
                opt.step()
                same(before, [p.detach() for p in model.parameters()])
                for index, held in opt.state_dict()["state"].items():
                    same(dict(held), kept[index])
                for j, p in enumerate(model.parameters()):
                    p.grad = torch.full_like(p, math.sin(i + j))
            opt.step()
        runs.append(opt.averaged_state_dict(model))
    same(*runs)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "link",
    [WeightEMA(0.99, every=2, warmup=True), WeightAverage(2, every=2), Lookahead(3)],
    ids=lambda link: type(link).__name__,
)
def test_a_parameter_that_is_unfrozen_late_has_the_average_of_its_own_steps(link, compile):
    """Which is the one that it would have alone, whatever the others have behind them."""
    early, late, alone = [Parameter(torch.full((3,), 0.5)) for _ in range(3)]
    late.requires_grad_(False)
    both = Modular([early, late], LR(0.1), link, compile=compile)
    other = Modular([alone], LR(0.1), link, compile=compile)
    for i in range(12):
        if i == 5:
            late.requires_grad_(True)
        early.grad = torch.full((3,), math.cos(i))
        if i >= 5:
            late.grad, alone.grad = torch.full((3,), math.sin(i)), torch.full((3,), math.sin(i))
            other.step()
        both.step()
        with both.averaged(), other.averaged():
            same(late.detach().clone(), alone.detach().clone())


def test_the_average_of_a_parameter_counts_its_own_steps():
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    opt = Modular([p, q], LR(1.0), WeightEMA(0.5))
    for i in range(3):
        p.grad, q.grad = torch.full((1,), -1.0), torch.full((1,), -1.0) if i == 2 else None
        opt.step()
    with opt.averaged():
        shown: list[Tensor] = [p.detach().clone(), q.detach().clone()]
    close(shown, [torch.tensor([2.25]), torch.tensor([1.0])])
