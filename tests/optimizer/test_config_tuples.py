"""Arguments that look like chains come back as what they were; chains by hand stay chains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Identity,
    Masked,
    Scale,
    Transform,
    WeightDecay,
)


class Holds(Transform):
    """A link with an argument that may be anything."""

    value: Any = None


def is_weight(name: str, p: Any) -> bool:
    return name.endswith("weight")


def back(link: Transform) -> Any:
    return Chain.from_config(json.loads(json.dumps(Chain(link).to_config())))[0]


@pytest.mark.parametrize(
    "value",
    [
        ("Adam", "LR"),
        ("Adam",),
        "Adam",
        (("Adam", "LR"), ("Scale",)),
        ("Adam", "no class"),
        (("Adam", {"lr": 1}), ("LR", {"lr": 2})),
        ("Adam", {"eps": 1.0}),
        {"names": ("Adam", "LR"), "tuple": ("LR",)},
        {"tuple": (1, 2)},
        {"type": "Adam"},
        (),
        (1.0, ("Adam",)),
    ],
    ids=str,
)
def test_data_that_looks_like_transforms_stays_data(value: Any) -> None:
    got = back(Holds(value)).value
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("mixed", [False, True], ids=["transforms", "and a name"])
def test_a_tuple_of_transforms_is_no_chain(mixed: bool) -> None:
    value = (Adam(), "LR") if mixed else (Adam(), Scale(2.0))
    got = back(Holds(value)).value
    assert isinstance(got, tuple)
    assert repr(got) == repr(value)


@pytest.mark.parametrize("chain", [Chain(Adam(), Scale(2.0)), Chain(Adam()), Chain()], ids=repr)
def test_a_chain_as_an_argument_stays_one(chain: Chain) -> None:
    got = back(Masked(chain, is_weight))
    assert isinstance(got.tfm, Chain)
    assert repr(got.tfm) == repr(chain)


@pytest.mark.parametrize(
    "inner",
    [
        ["Adam", "Identity"],
        [{"type": "Adam"}, "Identity"],
        [("Adam", {}), "Identity"],
        [["Adam", {}], "Identity"],
        [Adam(), Identity()],
    ],
    ids=str,
)
def test_chains_written_by_hand_are_read_as_ever(inner: Any) -> None:
    arguments = {"tfm": inner, "where": is_weight}
    for config in ({"type": "Masked", **arguments}, ("Masked", arguments)):
        made = Chain.from_config([config])[0]
        assert repr(made.tfm) == "Chain(Adam(), Identity())"


def test_a_preset_of_links_keeps_its_arguments() -> None:
    chain = Chain(ClipNorm(1.0), Holds(("Adam", "LR")), WeightDecay(0.1), LR(1e-3), name="mine")
    again = Chain.from_config(json.loads(json.dumps(chain.to_config())))
    assert repr(again) == repr(chain)
