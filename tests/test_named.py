"""named: the chain of a published method, and what it says of a name that it does not know."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from torchzero_clip import LR, Chain, Modular, TrustRatio, named
from torchzero_clip.published import NAMES

each = pytest.mark.parametrize("name", sorted(NAMES))


@each
def test_a_name_is_a_chain_of_links_that_a_config_can_hold(name: str) -> None:
    chain = named(name)
    assert isinstance(chain, Chain)
    again = Chain.from_config(json.loads(json.dumps(chain.to_config())))
    assert repr(again) == repr(chain)


@each
def test_every_argument_of_a_name_changes_its_chain(name: str) -> None:
    usual = {"momentum": 0.5} if name == "sgd" else {}  # without it there is nothing to dampen
    for argument, parameter in inspect.signature(NAMES[name]).parameters.items():
        value = parameter.default
        assert value is not parameter.empty, f"{name}: {argument} has no default"
        other = OTHERS.get(argument) or changed(value)
        given = {**usual, argument: other}
        assert repr(named(name, **given)) != repr(named(name, **usual)), argument


OTHERS = {"scale": "match_rms_adamw", "alpha_warmup": 9, "beta3_warmup": 9}


def changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(0.5 * x for x in value)
    assert isinstance(value, (int, float))
    return value + 1 if isinstance(value, int) else value * 0.5 or 0.25


@each
def test_a_name_tells_what_it_is_and_where_it_comes_from(name: str) -> None:
    about, _, reference = (inspect.getdoc(NAMES[name]) or "").partition("\n\nReference:\n")
    assert about.partition("\n")[0].endswith(".")
    assert reference.strip()


def test_the_learning_rate_is_live() -> None:
    w = torch.nn.Parameter(torch.ones(2, 2))
    opt = Modular([w], named("lamb", lr=0.5))
    assert opt.param_groups[0]["lr"] == 0.5
    assert [type(link) for link in named("lamb")][2:] == [TrustRatio, LR]


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"there is no 'LAMP': did you mean 'lamb'\?"):
        named("LAMP")


def test_an_unknown_argument_gets_those_that_there_are() -> None:
    with pytest.raises(TypeError, match="'lion' takes lr, betas, weight_decay, got 'momentum'"):
        named("lion", momentum=0.9)
