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
    Accumulate,
    AdaGC,
    Adam,
    ClipNorm,
    ClipPercentile,
    Freeze,
    Graft,
    Guard,
    Identity,
    Masked,
    Modular,
    Momentum,
    Orthogonalize,
    Prodigy,
    SkipSpike,
    Transform,
    Watch,
    WeightDecay,
    ZClip,
    megatron_entry,
)
from torchzero_clip.core.formats import Kahan

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


OF_ALL = {
    "ZClip": ZClip,
    "SkipSpike": SkipSpike,
    "ClipNorm": lambda: ClipNorm(1.0, dim="global"),
    "groups": lambda: ClipNorm(1.0, dim="group"),
    "ClipPercentile": lambda: ClipPercentile(99.0, dim="global"),
    "Prodigy": Prodigy,
    "AdaGC": AdaGC,  # whose warm-up takes the norm of all
    "Watch": Watch,
    "inside": lambda: Masked(ZClip(), lambda name, p: True),
}


@pytest.mark.filterwarnings("ignore:megatron_entry:UserWarning")
@at_once("rule", OF_ALL)
def test_what_looks_at_all_parameters_sees_all_stages_or_is_refused(rule: str) -> None:
    kwargs = megatron_entry(OF_ALL[rule](), LR(1.0)).config_to_kwargs
    stages = SimpleNamespace(tp=None, mp=SEVERAL)
    assert kwargs(CONFIG, [], stages)["process_group"] is SEVERAL
    assert kwargs(CONFIG, [], ALONE)["process_group"] is None
    with pytest.raises(ValueError, match="which is not supported with tensor parallelism"):
        kwargs(CONFIG, [], SimpleNamespace(tp=SEVERAL, mp=SEVERAL))
    layers = SimpleNamespace(**vars(CONFIG), use_layer_wise_distributed_optimizer=True)
    with pytest.raises(ValueError, match="which is not supported with a layer-wise optimizer"):
        kwargs(layers, [], ALONE)


OF_TENSORS = {
    "ClipNorm": lambda: ClipNorm(1.0),
    "slices": lambda: ClipNorm(1.0, dim=0),
    "layers": lambda: ClipNorm(1.0, dim="layer"),
    "Orthogonalize": Orthogonalize,
    "Graft": lambda: Graft(Adam(), ClipNorm(1.0)),
    "ClipPercentile": lambda: ClipPercentile(99.0),
    "inside": lambda: Masked(ClipNorm(1.0), lambda name, p: True),
}


@pytest.mark.filterwarnings("ignore:megatron_entry:UserWarning")
@at_once("rule", OF_TENSORS)
def test_what_looks_at_whole_tensors_is_refused_under_tensor_parallelism(rule: str) -> None:
    kwargs = megatron_entry(OF_TENSORS[rule](), LR(1.0)).config_to_kwargs
    assert "process_group" not in kwargs(CONFIG, [], SimpleNamespace(tp=None, mp=SEVERAL))
    with pytest.raises(ValueError, match="needs whole tensors, but with tensor parallelism"):
        kwargs(CONFIG, [], SimpleNamespace(tp=SEVERAL, mp=SEVERAL))


def test_norms_of_layers_are_refused_under_a_layer_wise_optimizer() -> None:
    kwargs = megatron_entry(ClipNorm(1.0, dim="layer"), LR(1.0)).config_to_kwargs
    layers = SimpleNamespace(**vars(CONFIG), use_layer_wise_distributed_optimizer=True)
    with pytest.raises(ValueError, match="ClipNorm combines several parameters, which is"):
        kwargs(layers, [], ALONE)


@pytest.mark.filterwarnings("ignore:megatron_entry:UserWarning")
@at_once(
    "rule", [Guard, Adam, Identity, lambda: Accumulate(2), lambda: Freeze(lambda name, p: True)]
)
def test_what_takes_no_norm_asks_for_nobody(rule: Any) -> None:
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
    with pytest.raises(ValueError, match="names= must have a different value for each key"):
        megatron_entry(Adam(), LR(1.0), names={"Adam/exp_avg": "m", "Adam/exp_avg_sq": "m"})


def test_a_name_of_state_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"names= has the key 'Adam/exp_avgs'.* did you mean 'Adam/ex"
    ):
        megatron_entry(Adam(), LR(1.0), names={"Adam/exp_avgs": "m"})
    with pytest.raises(ValueError, match=r"names= has the key 'state'.*; they have \['Adam/step',"):
        megatron_entry(Adam(), LR(1.0), names={"state": "m"})
    kept = {"Adam/exp_avg": "m", Kahan.key: "lost"}
    entry = megatron_entry(Adam(), LR(1.0), names=kept, rounding="kahan")
    assert entry.optimizer_cls.names["Adam/exp_avg"] == "m"


def test_state_of_another_shape_is_told_of() -> None:
    with pytest.warns(
        UserWarning, match="cannot store the state Momentum/started, because this state"
    ):
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
        with pytest.raises(ValueError, match="needs whole tensors, but Megatron-LM's Distr"):
            one.step()
        assert all(map(torch.equal, before, pieces))


@at_once("rule", [lambda: ClipNorm(1.0), Orthogonalize, lambda: Graft(Adam(), ClipNorm(1.0))])
def test_pieces_as_long_as_a_vector_are_pieces(rule: Any) -> None:
    entry = megatron_entry(rule(), LR(1.0))
    for one in (entry.optimizer_cls(params(), lr=1.0), copy.deepcopy(made(rule(), LR(1.0)))):
        pieces = [p.detach().view(-1)[:5].clone() for p in params()]  # as long as the bias
        one.param_groups[0]["params"] = pieces
        fill(pieces)
        before = [p.clone() for p in pieces]
        with pytest.raises(ValueError, match="needs whole tensors, but Megatron-LM's Distr"):
            one.step()
        assert all(map(torch.equal, before, pieces))


def test_a_rank_of_a_layer_wise_optimizer_may_have_vectors_alone() -> None:
    layers = SimpleNamespace(**vars(CONFIG), use_layer_wise_distributed_optimizer=True)
    entry = megatron_entry(ClipNorm(1.0), LR(1.0))
    opt = entry.optimizer_cls(params(), **entry.config_to_kwargs(layers, [], ALONE))
    for one in (opt, copy.deepcopy(opt)):
        one.param_groups[0]["params"] = one.param_groups[0]["params"][1:2]
        fill(one.param_groups[0]["params"])
        before = one.param_groups[0]["params"][0].detach().clone()
        one.step()
        assert not torch.equal(before, one.param_groups[0]["params"][0])


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
