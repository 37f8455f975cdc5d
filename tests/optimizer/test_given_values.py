"""Live values of a checkpoint and those that were given: which are taken, and what is said."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from tests.helpers import network, one, param, saved
from torchzero_clip import (
    ASGD,
    EMA,
    LR,
    Adagrad,
    Adam,
    ClipNorm,
    Clipper,
    ClipValue,
    Guard,
    Modular,
    Momentum,
    NAdam,
    Orthogonalize,
    RAdam,
    RMSprop,
    WeightDecay,
    ZClip,
    attach,
    schedule,
    take_over,
)


def clipped(max_norm=1.0, lr=0.1, groups=None, links=()):
    p = one()
    return Modular(groups or [p], ClipNorm(max_norm), *links, LR(lr))


def said(load):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(warning.message) for warning in caught]


# ---------------------------------------------------------------------- the warning


def test_a_limit_that_was_given_otherwise_is_named_once():
    opt = clipped(0.1)
    (message,) = said(lambda: opt.load_state_dict(clipped(1.0).state_dict()))
    assert message.startswith("max_norm: 1.0 from the checkpoint replaces 0.1")
    assert opt.param_groups[0]["max_norm"] == 1.0


def test_values_of_a_later_group_name_it():
    groups = [{"params": [one()]}, {"params": [one()], "max_norm": 3.0}]
    others = [{"params": [one()]}, {"params": [one()], "max_norm": 2.0}]
    opt = clipped(groups=groups)
    (message,) = said(lambda: opt.load_state_dict(clipped(groups=others).state_dict()))
    assert message.startswith("group 1: max_norm: 2.0 from the checkpoint replaces 3.0")


@pytest.mark.parametrize("given", [0.1, torch.tensor(0.1), torch.tensor([0.1])[0].double()])
def test_a_number_and_a_tensor_of_it_are_alike(given):
    opt = clipped(lr=given)
    assert said(lambda: opt.load_state_dict(clipped(lr=0.1).state_dict())) == []


def test_pairs_are_compared():
    def make(beta):
        return Modular([one()], Adam((0.9, beta)), LR(0.1))

    assert said(lambda: make(0.95).load_state_dict(make(0.95).state_dict())) == []
    (message,) = said(lambda: make(0.95).load_state_dict(make(0.99).state_dict()))
    assert message.startswith("betas: (0.9, 0.99) from the checkpoint replaces (0.9, 0.95)")


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: CosineAnnealingLR(opt, 9),
        lambda opt: LambdaLR(opt, lambda step: (step + 1) / 10),
        lambda opt: OneCycleLR(opt, 0.1, total_steps=9),
    ],
    ids=["cosine", "warm-up", "one cycle"],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_rate_that_a_scheduler_moved_is_no_other(make, first):
    """Whether the scheduler is there before loading or comes after it."""
    runs = [Modular([one()], Momentum(0.9), LR(0.1)) for _ in range(2)]
    moved = make(runs[0])
    for _ in range(3):
        runs[0].step()
        moved.step()
    if first:
        make(runs[1])
    assert said(lambda: runs[1].load_state_dict(saved(runs[0].state_dict()))) == []


def test_a_rate_that_a_scheduler_moved_from_another_start_is_named():
    first, second = clipped(lr=0.1), clipped(lr=0.05)
    for opt in (first, second):
        CosineAnnealingLR(opt, 9)
    (message,) = said(lambda: second.load_state_dict(first.state_dict()))
    assert message.startswith("lr: 0.1 from the checkpoint replaces 0.05")


def test_a_value_that_a_schedule_moves_is_no_other():
    runs = [clipped(10.0), clipped(10.0)]
    limits = [schedule(opt, "max_norm", lambda step: 10.0 / (step + 1)) for opt in runs]
    for _ in range(3):
        limits[0].step()
    assert said(lambda: runs[1].load_state_dict(runs[0].state_dict())) == []
    assert runs[1].param_groups[0]["max_norm"] == 2.5


# ---------------------------------------------------------------------- keep


def test_what_is_kept_stays_as_it_was_given():
    opt, other = clipped(0.1, 0.2), clipped(1.0, 0.1)
    assert said(lambda: opt.load_state_dict(other.state_dict(), keep=("max_norm", "lr"))) == []
    assert [opt.param_groups[0][key] for key in ("max_norm", "lr")] == [0.1, 0.2]
    opt = clipped(0.1, 0.2)
    (message,) = said(lambda: opt.load_state_dict(other.state_dict(), keep="ClipNorm/max_norm"))
    assert message.startswith("lr: 0.1 from the checkpoint replaces")
    assert opt.param_groups[0]["max_norm"] == 0.1


def test_a_rate_that_is_kept_is_what_a_new_scheduler_starts_from():
    other = clipped(lr=0.1)
    CosineAnnealingLR(other, 9)
    opt = clipped(lr=0.2)
    opt.load_state_dict(other.state_dict(), keep=("lr",))
    assert LambdaLR(opt, lambda step: 0.5).get_last_lr() == [0.1]


def test_state_comes_from_the_checkpoint_whatever_is_kept():
    def run(max_norm):
        p = param(0.0, grad=[8.0])
        return p, Modular([p], ClipNorm(max_norm), Momentum(0.5), LR(1.0))

    _, first = run(4.0)
    first.step()
    p, second = run(1.0)
    second.load_state_dict(first.state_dict(), keep=("max_norm",))
    second.step()
    assert p.item() == -(1.0 + 0.5 * 4.0)


def test_a_handle_keeps_as_well():
    p = one()
    handles = [attach(torch.optim.SGD([p], lr=0.1), ClipNorm(x)) for x in (1.0, 2.0)]
    handles[0].load_state_dict(handles[1].state_dict(), keep=("max_norm",))
    assert handles[0].param_groups[0]["max_norm"] == 1.0


def test_a_value_that_no_link_has_cannot_be_kept():
    opt = clipped()
    with pytest.raises(
        ValueError, match=r"keep= must contain only hyperparameters, .*, got 'max_nrom'"
    ):
        opt.load_state_dict(opt.state_dict(), keep=("max_nrom",))


@pytest.mark.parametrize("keep", [None, True])
def test_keep_that_is_no_name_and_no_sequence_raises_an_error(keep):
    opt = clipped()
    with pytest.raises(TypeError, match=rf"keep= must be a name or a sequence .*, got {keep}"):
        opt.load_state_dict(opt.state_dict(), keep=keep)


def test_a_bad_value_of_a_checkpoint_can_be_left_out():
    opt, state = clipped(), clipped().state_dict()
    state["param_groups"][0]["max_norm"] = -1.0
    with pytest.raises(ValueError, match="max_norm must be"):
        opt.load_state_dict(state)
    opt.load_state_dict(state, keep=("max_norm",))


# ---------------------------------------------------------------------- another chain


def stepped(model, opt):
    opt.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    opt.step()
    return opt


def test_the_errors_about_other_checkpoints_name_the_function():
    model = network()
    opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(0.1))
    other = stepped(model, Modular(model.parameters(), ZClip(), Adam(), LR(0.1)))
    with pytest.raises(
        ValueError,
        match=r"state of the transforms that both have, call take_over\(optimizer, state_dict\)",
    ):
        opt.load_state_dict(other.state_dict())
    adam = stepped(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match=r'take_over\(optimizer, state_dict, link="Adam"\)'):
        opt.load_state_dict(adam.state_dict())


def test_a_run_of_torch_goes_on_as_it_would_have():
    ours, theirs = network(), network()
    adamw = stepped(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1))
    ours.load_state_dict(theirs.state_dict())
    chain = Adam(), WeightDecay(0.1), LR(0.01)
    opt = Modular(ours.parameters(), ClipNorm(1e9), *chain)
    taken = take_over(opt, saved(adamw.state_dict()), link="Adam")
    assert taken == ["Adam/exp_avg", "Adam/exp_avg_sq", "Adam/step"]
    for _ in range(3):
        stepped(ours, opt), stepped(theirs, adamw)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


TORCH = {
    "NAdam": (torch.optim.NAdam, lambda: [NAdam(), LR(0.01)]),
    "Adam": (torch.optim.Adam, lambda: [Adam(), LR(0.01)]),
    "RAdam": (torch.optim.RAdam, lambda: [RAdam(), LR(0.01)]),
    "RMSprop": (torch.optim.RMSprop, lambda: [RMSprop(), LR(0.01)]),
    "Adagrad": (torch.optim.Adagrad, lambda: [Adagrad(), LR(0.01)]),
    "ASGD": (torch.optim.ASGD, lambda: [ASGD(lr=0.01)]),
    "Momentum": (
        functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        lambda: [Momentum(0.9, dampening=0.5), LR(0.01)],
    ),
}


def driven(model, opt, steps):
    """The optimizer after steps with drawn gradients."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()
    return opt


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("link", TORCH)
def test_the_state_of_every_optimizer_of_torch_goes_over_in_every_dtype(link, dtype):
    make, chain = TORCH[link]
    theirs = network().to(dtype)
    optimizer = driven(theirs, make(theirs.parameters(), lr=0.01), range(3))
    ours = network().to(dtype)
    ours.load_state_dict(theirs.state_dict())
    opt = Modular(ours.parameters(), *chain())
    assert take_over(opt, saved(optimizer.state_dict()), link=link)
    fresh = Modular(network().to(dtype).parameters(), *chain())
    fresh.load_state_dict(saved(opt.state_dict()))
    driven(ours, opt, range(3, 6)), driven(theirs, optimizer, range(3, 6))
    # torch rounds the state of bfloat16 parameters in every step
    near = {"rtol": 0.05, "atol": 0.01} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **near)


def weights():
    return torch.nn.Linear(3, 4, bias=False, dtype=torch.float64)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it since 2.9")
def test_the_average_of_muon_goes_into_an_average_alone():
    ours, theirs = weights(), weights()
    muon = torch.optim.Muon(theirs.parameters(), lr=0.01, weight_decay=0.0)
    alone = Modular(weights().parameters(), EMA(0.95), LR(0.0))
    for i in range(4):
        grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).double()
        theirs.weight.grad = grad
        alone.param_groups[0]["params"][0].grad = grad.clone()
        muon.step(), alone.step()
    state = saved(muon.state_dict())
    opt = Modular(ours.parameters(), EMA(0.95, nesterov=True), Orthogonalize(), LR(0.01))
    assert take_over(opt, state, link="EMA") == ["EMA/ema"]
    (expected,) = [held["EMA/ema"] for held in alone.state.values()]
    torch.testing.assert_close(opt.state[ours.weight]["EMA/ema"], expected, rtol=1e-6, atol=0)
    summed = Modular(ours.parameters(), Momentum(0.95), Orthogonalize(), LR(0.01))
    with pytest.raises(ValueError, match=r"link='Momentum': .* is an average of gradients, but"):
        take_over(summed, state, link="Momentum")
    debiased = Modular(ours.parameters(), EMA(0.95, debias=True), Orthogonalize(), LR(0.01))
    with pytest.raises(ValueError, match="EMA with debias=True needs a step count"):
        take_over(debiased, state, link="EMA")


def test_the_sum_of_sgd_goes_into_no_average():
    model = network()
    sgd = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    opt = Modular(model.parameters(), EMA(0.9), LR(0.1))
    with pytest.raises(ValueError, match=r"link='EMA': .* is a sum of gradients, but EMA needs an"):
        take_over(opt, sgd.state_dict(), link="EMA")


@pytest.mark.parametrize(
    ("torch_class", "options", "rule", "dropped"),
    [
        (torch.optim.Adamax, {}, Adam(), "exp_inf"),
        (torch.optim.RMSprop, {"momentum": 0.9}, RMSprop(), "momentum_buffer"),
    ],
)
def test_take_over_warns_about_state_that_the_link_does_not_keep(
    torch_class, options, rule, dropped
):
    model = network()
    other = stepped(model, torch_class(model.parameters(), lr=0.1, **options))
    opt = Modular(model.parameters(), rule, LR(0.1))
    with pytest.warns(UserWarning, match=rf"has the state \['{dropped}'\], but"):
        take_over(opt, saved(other.state_dict()), link=type(rule).__name__)


def test_a_link_that_is_not_there_is_named():
    model = network()
    sgd = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    opt = Modular(model.parameters(), Momentum(0.9), LR(0.1))
    words = r"take_over: link= must be one of \['LR', 'Momentum'\], got 'Momentun'"
    with pytest.raises(ValueError, match=words):
        take_over(opt, sgd.state_dict(), link="Momentun")


def test_a_link_in_front_is_added_in_the_middle_of_a_run():
    model = network()
    first = stepped(model, Modular(model.parameters(), ZClip(), Adam(), LR(0.01)))
    second = Modular(model.parameters(), Guard(), ClipValue(1e9), ZClip(), Adam(), LR(0.02))
    with pytest.warns(UserWarning, match="lr: 0.01 from the checkpoint replaces 0.02"):
        taken = take_over(second, first.state_dict())
    assert {name.partition("/")[0] for name in taken} == {"ZClip", "Adam"}
    weight = model[0].weight
    assert second.state[weight]["Adam/exp_avg"].equal(first.state[weight]["Adam/exp_avg"])
    stepped(model, second)  # what went over is a copy
    assert first.state[weight]["Adam/step"] == 1
    assert second.state[weight]["Adam/step"] == 2
    third = Modular(model.parameters(), ZClip(), Adam(), ClipNorm(1e9), LR(0.02))
    take_over(third, first.state_dict(), keep=("lr",))
    assert third.param_groups[0]["lr"] == 0.02


def test_a_checkpoint_without_a_name_of_the_chain_is_an_error():
    model = network()
    adam = stepped(model, torch.optim.Adam(model.parameters()))
    opt = Modular(model.parameters(), Adam(), LR(0.1))
    with pytest.raises(ValueError, match=r'have no state in common.* such as link="Adam"'):
        take_over(opt, adam.state_dict())
    with pytest.raises(TypeError, match="optimizer must be a Modular"):
        take_over(adam, adam.state_dict())
    with pytest.raises(ValueError, match="has groups of"):
        take_over(Modular([one()], Adam(), LR(0.1)), adam.state_dict(), link="Adam")


def test_a_clipper_takes_over_as_well():
    p = one()
    first, second = Clipper([p], ZClip()), Clipper([p], ClipValue(9.0), ZClip())
    first.step()
    assert take_over(second, first.state_dict())
