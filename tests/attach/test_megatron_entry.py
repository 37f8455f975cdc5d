"""megatron_entry without Megatron-LM: names of state, its configuration, pieces of parameters."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Guard,
    Modular,
    Momentum,
    Orthogonalize,
    SkipSpike,
    Transform,
    WeightDecay,
    ZClip,
    megatron_entry,
)

CONFIG = SimpleNamespace(lr=1e-2, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
ALONE = SimpleNamespace(tp=None, mp=None)
SEVERAL = SimpleNamespace(size=lambda: 2)


def params() -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape)) for shape in ((6, 5), (5,), (4, 6))]


def fill(ps: list[Any], i: int = 0) -> None:
    generator = torch.Generator().manual_seed(i)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator)


def made(*chain: Transform, **options: Any) -> Any:
    entry = megatron_entry(*chain)
    return entry.optimizer_cls(params(), **options)


def test_the_configuration_sets_what_the_chain_owns() -> None:
    chain = ZClip(), Adam(), WeightDecay(0.0), LR(1.0)
    values = megatron_entry(*chain).config_to_kwargs(CONFIG, [], ALONE)
    assert values.pop("process_group") is None
    assert values == {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    opt = megatron_entry(*chain).optimizer_cls(params(), **values)
    other = Modular(ps := params(), ZClip(), Adam((0.9, 0.95)), WeightDecay(0.1), LR(1e-2))
    for i in range(4):
        fill(opt.param_groups[0]["params"], i)
        fill(ps, i)
        opt.step()
        other.step()
    assert all(map(torch.equal, ps, opt.param_groups[0]["params"]))
    assert megatron_entry(Orthogonalize(), LR(1.0)).config_to_kwargs(CONFIG) == {"lr": 1e-2}


@at_once("rule", [ZClip, SkipSpike, lambda: ClipNorm(1.0, dim="global")])
def test_one_norm_of_all_is_that_of_all_stages_or_refused(rule: Any) -> None:
    kwargs = megatron_entry(rule(), LR(1.0)).config_to_kwargs
    stages = SimpleNamespace(tp=None, mp=SEVERAL)
    assert kwargs(CONFIG, [], stages)["process_group"] is SEVERAL
    with pytest.raises(ValueError, match="which parameters are there twice: take its clip_grad"):
        kwargs(CONFIG, [], SimpleNamespace(tp=SEVERAL, mp=SEVERAL))
    layers = SimpleNamespace(**vars(CONFIG), use_layer_wise_distributed_optimizer=True)
    with pytest.raises(ValueError, match="under a layer-wise optimizer Megatron-LM alone knows"):
        kwargs(layers, [], ALONE)


@at_once("rule", [Guard, lambda: ClipNorm(1.0), Adam])
def test_what_takes_no_norm_of_all_asks_for_nobody(rule: Any) -> None:
    kwargs = megatron_entry(rule(), LR(1.0)).config_to_kwargs
    assert "process_group" not in kwargs(CONFIG, [], SimpleNamespace(tp=SEVERAL, mp=SEVERAL))


def test_state_has_short_names_which_may_be_chosen_and_loads_by_either() -> None:
    entry = megatron_entry(Adam(), LR(1.0), names={"Adam/exp_avg": "m"})
    opt = entry.optimizer_cls(params(), lr=1.0)
    entry.init_state_fn(opt)
    state = opt.state_dict()
    assert set(state["state"][0]) == {"m", "exp_avg_sq", "step"}
    opt.load_state_dict(state)
    plain = Modular(params(), Adam(), LR(1.0))
    plain.init_state()
    opt.load_state_dict(plain.state_dict())
    assert set(opt.state[opt.param_groups[0]["params"][0]]) == {
        "Adam/exp_avg",
        "Adam/exp_avg_sq",
        "Adam/step",
    }


def test_names_that_are_two_are_refused() -> None:
    with pytest.raises(ValueError, match="names must give each state a name of its own"):
        megatron_entry(Adam(), LR(1.0), names={"Adam/exp_avg": "m", "Adam/exp_avg_sq": "m"})


def test_state_of_another_shape_is_told_of() -> None:
    with pytest.warns(UserWarning, match="Momentum/started of a parameter has not its shape"):
        megatron_entry(Momentum(0.9), LR(1.0))


@at_once("rule", [lambda: ClipNorm(1.0), Orthogonalize])
def test_pieces_are_refused_by_name_and_parameters_that_are_gone_are_not(rule: Any) -> None:
    entry = megatron_entry(rule(), LR(1.0))
    opt = entry.optimizer_cls([p for p in params() if p.dim() > 1], lr=1.0)
    opt.param_groups[0]["params"] = opt.param_groups[0]["params"][1:]  # others have the rest
    fill(opt.param_groups[0]["params"])
    opt.step()
    for one in (opt, copy.deepcopy(opt)):
        pieces = [p.detach().view(-1)[:3].clone() for p in one.param_groups[0]["params"]]
        one.param_groups[0]["params"] = pieces
        fill(pieces)
        before = [p.clone() for p in pieces]
        with pytest.raises(ValueError, match="looks at whole tensors, and Megatron-LM's Distr"):
            one.step()
        assert all(map(torch.equal, before, pieces))


def test_pieces_are_taken_by_rules_about_entries() -> None:
    opt = made(Guard(), Adam(), WeightDecay(0.1), LR(1e-2), lr=1e-2)
    whole = Modular(ps := params(), Adam(), WeightDecay(0.1), LR(1e-2))
    pieces = [p.detach().view(-1)[:3].clone() for p in opt.param_groups[0]["params"]]
    opt.param_groups[0]["params"] = pieces
    for i in range(3):
        fill(ps, i)
        for piece, p in zip(pieces, ps, strict=True):
            assert p.grad is not None
            piece.grad = p.grad.view(-1)[:3].clone()
        opt.step()
        whole.step()
    for piece, p in zip(pieces, ps, strict=True):
        assert torch.equal(piece, p.detach().view(-1)[:3])
