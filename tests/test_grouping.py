"""Parameter groups of a model: no decay for vectors, layer decay, values by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    Modular,
    WeightDecay,
    attach,
    groups,
    named,
    release,
)


class Net(nn.Module):
    """A small transformer's names: an embedding, numbered blocks, a norm, a head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def held(made: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """For each name what its group has under a key."""
    return {name: group.get(key) for group in made for name in group["param_names"]}


def test_vectors_and_biases_have_no_decay_and_the_rest_that_of_the_optimizer() -> None:
    decays = held(groups(Net()), "weight_decay")
    assert {name for name, decay in decays.items() if decay is None} == {
        "embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight",
    }  # fmt: skip
    assert {decay for decay in decays.values() if decay is not None} == {0.0}


def test_a_bias_of_two_dims_and_what_the_model_lists_have_no_decay() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.table, self.w = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))

        def no_weight_decay(self) -> set[str]:
            return {"tab*", "not_there"}

    assert held(groups(Listed()), "weight_decay") == {"bias": 0.0, "table": 0.0, "w": None}
    (one,) = groups(Listed(), decay_vectors=True)
    assert one["param_names"] == ["bias", "table", "w"]
    assert one.keys() == {"params", "param_names"}


def test_every_parameter_that_is_trained_is_in_one_group_under_its_name() -> None:
    net = Net()
    net.embed.weight.requires_grad_(False)
    made = groups(net, {"head.*": {"lr": 1.0}, "embed.*": {"lr": 2.0}}, lr=0.1, layer_decay=0.5)
    rows = [row for g in made for row in zip(g["param_names"], g["params"], strict=True)]
    assert {name: id(p) for name, p in rows} == {
        name: id(p) for name, p in net.named_parameters() if name != "embed.weight"
    }
    assert len(rows) == 8


def test_parameters_with_equal_values_share_a_group() -> None:
    made = groups(Net(), {"*.bias": {"weight_decay": 0.0}, "norm.*": {"lr": 1.0}})
    assert [set(g["param_names"]) for g in made] == [
        {"embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight"},
        {"blocks.0.bias", "blocks.1.bias", "head.bias"},
        {"norm.weight", "norm.bias"},
    ]


def test_of_rules_for_the_same_value_the_first_match_wins_and_others_add_theirs() -> None:
    rules: dict[str, Any] = {
        "*.bias | *norm*": {"weight_decay": 0},
        "head.*": {"lr": 1.0},
        "*": {"lr": 2.0},
    }
    made = groups(Net(), rules)
    rates, decays = held(made, "lr"), held(made, "weight_decay")
    assert {name for name, rate in rates.items() if rate == 1.0} == {"head.weight", "head.bias"}
    assert {rates[name] for name in rates if not name.startswith("head.")} == {2.0}
    assert decays["head.bias"] == 0


def test_the_rate_of_a_layer_is_a_share_of_the_next_ones() -> None:
    rates = held(groups(Net(), {"head.*": {"lr": 8.0}}, lr=1.0, layer_decay=0.5), "lr")
    assert rates == {
        "embed.weight": 0.125,
        "blocks.0.weight": 0.25,
        "blocks.0.bias": 0.25,
        "blocks.1.weight": 0.5,
        "blocks.1.bias": 0.5,
        "norm.weight": 1.0,  # behind the blocks
        "norm.bias": 1.0,
        "head.weight": 8.0,
        "head.bias": 8.0,
    }


def test_a_norm_between_two_stacks_belongs_to_the_block_before_it() -> None:
    net = nn.Module()
    net.encoder = nn.Module()
    net.encoder.layer = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    net.encoder.norm = nn.LayerNorm(2, bias=False)
    net.decoder = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    assert held(groups(net, lr=1.0, layer_decay=0.5), "lr") == {
        "encoder.layer.0.weight": 0.5,
        "encoder.norm.weight": 0.5,
        "decoder.0.weight": 1.0,
    }


def test_layers_may_be_given_as_patterns() -> None:
    layers = ["embed.*", "blocks.*", "norm.* | head.*"]
    rates = held(groups(Net(), lr=1.0, layer_decay=0.5, layers=layers), "lr")
    assert rates["embed.weight"] == 0.25
    assert {rates["blocks.0.weight"], rates["blocks.1.bias"]} == {0.5}
    assert {rates["norm.weight"], rates["head.bias"]} == {1.0}


def test_a_model_may_place_its_names_itself() -> None:
    class Placed(Net):
        def group_matcher(self, coarse: bool) -> Any:
            return lambda name: None if "head" in name else int("norm" in name)

    rates = held(groups(Placed(), lr=1.0, layer_decay=0.5), "lr")
    assert (rates["embed.weight"], rates["norm.bias"], rates["head.bias"]) == (0.25, 0.5, 1.0)


def test_where_a_rate_is_not_known_layer_decay_is_told_as_timm_does_and_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'embed.weight' is not known, .*pass lr="):
        made = groups(Net(), {"head.*": {"lr": 8.0}}, layer_decay=0.5)
    scales = held(made, "lr_scale")
    assert (scales["embed.weight"], scales["norm.bias"], scales["head.bias"]) == (0.125, 1.0, None)
    assert held(made, "lr")["head.bias"] == 8.0


def tied() -> Net:
    net = Net()
    net.head.weight = nn.Parameter(net.embed.weight[:3])
    net.copy = net.head
    return net


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rules": {"haed.*": {}}}, ValueError, "'haed.*' matches no parameter: did you mean 'head"),
    ({"rules": {"*.bias | *.gama": {}}}, ValueError, "'*.gama' matches no parameter"),
    ({"rules": {"blocks.1.wieght": {}}}, ValueError, "did you mean 'blocks.1.weight'"),
    (
        {"rules": {"copy.weight": {}}},
        ValueError,
        "'copy.weight' is the same parameter as 'head.weight'",
    ),
    ({"rules": {"*": {"lr": 1}, "head.*": {"lr": 2}}}, ValueError, "'head.*' has no effect"),
    ({"rules": {"*.bias": {"weight_decay": 0.1}}}, ValueError, "pass decay_vectors=True"),
    ({"rules": [("head.*", {})]}, TypeError, "rules= must be a dict"),
    ({"rules": {"head.*": 0.1}}, TypeError, "must be a dict of hyperparameters"),
    ({"rules": {"head.*": {"params": []}}}, TypeError, "must be a dict of hyperparameters"),
    ({"rules": {1: {"lr": 0.1}}}, TypeError, "a pattern must be a string"),
    ({"lr": 1.0, "layer_decay": 0.0}, ValueError, "greater than 0, got 0.0"),
    ({"lr": 1.0, "layer_decay": "x"}, ValueError, "greater than 0, got 'x'"),
    ({"lr": 1.0, "layer_decay": 0.5, "layers": ["*"]}, ValueError, "found only one layer"),
    (
        {"lr": 1.0, "layer_decay": 0.5, "layers": ["embed.*", "head.*"]},
        ValueError,
        "does not match 'blocks",
    ),
]


@at_once("arguments, error, said", ERRORS)
def test_what_makes_no_sense_is_a_sentence(
    arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"^groups: .*{re.escape(said)}"):
        groups(tied(), **arguments)


def test_what_is_no_model_is_a_sentence() -> None:
    with pytest.raises(TypeError, match="model must be"):
        groups(Net().parameters())  # type: ignore[arg-type]


# --- what takes them


def trained(net: Net, opt: Any, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        opt.zero_grad()
        net(torch.arange(5)).square().mean().backward()
        opt.step()
    return [p.detach().clone() for p in net.parameters()]


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def made_of(net: Net) -> list[dict[str, Any]]:
    return groups(net, {"head.*": {"lr": 0.05}}, lr=0.01, layer_decay=0.5)


@at_once(
    "chain",
    [
        (Adam(), WeightDecay(0.1), LR(1.0)),
        (named("adamw", lr=1.0, weight_decay=0.1),),
    ],
)
def test_a_chain_and_torch_do_the_same_with_them(chain: tuple[Any, ...]) -> None:
    one, two = fresh(), fresh()
    theirs = trained(one, torch.optim.AdamW(made_of(one), weight_decay=0.1))
    torch.testing.assert_close(trained(two, Modular(made_of(two), *chain)), theirs)


def test_they_train_as_the_same_values_written_by_hand() -> None:
    one, two = fresh(), fresh()
    rates, decays = held(made_of(one), "lr"), held(made_of(one), "weight_decay")
    by_hand = [
        {"params": [p], "lr": rates[name], "weight_decay": 0.1 if decays[name] is None else 0.0}
        for name, p in one.named_parameters()
    ]
    ours = trained(two, torch.optim.AdamW(made_of(two), weight_decay=0.1))
    torch.testing.assert_close(ours, trained(one, torch.optim.AdamW(by_hand)))


def test_clips_in_front_of_another_optimizer_take_them() -> None:
    nets = [fresh() for _ in range(3)]
    opts = [torch.optim.AdamW(made_of(net)) for net in nets]
    attach(opts[0], ClipNorm(0.1, dim="global"))
    clipper = Clipper(groups(nets[1], {"head.*": {"max_norm": 0.1}}), ClipNorm(0.1, dim="global"))

    def ours(*_: Any) -> None:
        clipper.step()

    def torchs_own(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(nets[2].parameters(), 0.1)

    opts[1].register_step_pre_hook(ours)
    opts[2].register_step_pre_hook(torchs_own)
    attached, clipped, torchs = map(trained, nets, opts)
    torch.testing.assert_close(attached, torchs)
    torch.testing.assert_close(clipped, torchs)


def test_release_steps_with_them() -> None:
    one, two = fresh(), fresh()
    chain = Adam(), WeightDecay(0.1), LR(1.0)
    whole = trained(one, Modular(made_of(one), *chain))
    torch.testing.assert_close(trained(two, release(made_of(two), *chain)), whole)


def test_a_checkpoint_of_them_loads() -> None:
    one, two = fresh(), fresh()
    chain = ClipNorm(1.0, dim="layer"), Adam(), WeightDecay(0.1), LR(1.0)
    first, second = Modular(made_of(one), *chain), Modular(made_of(two), *chain)
    trained(one, first)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    torch.testing.assert_close(trained(two, second), trained(one, first), rtol=0, atol=0)
