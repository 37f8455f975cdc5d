"""Links: a transform at its place, with its values in a group, and the names of its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchzero_clip import (
    Adam,
    Chain,
    ClipNorm,
    Masked,
    Modular,
    Momentum,
    Scale,
    Transform,
    WeightDecay,
    zeros_like_state,
)
from torchzero_clip.core.chain import bind


def test_links_are_named_by_their_place_and_unnamed_chains_dissolve() -> None:
    chain = Chain(
        ClipNorm(1.0), Chain(ClipNorm(2.0), Adam()), Chain(Scale(2.0), name="last"), Momentum()
    )
    links = [link for top in bind(chain) for link in top.walk()]
    assert [link.path for link in links] == [
        "ClipNorm",
        "ClipNorm_2",
        "Adam",
        "last",
        "last/Scale",
        "Momentum",
    ]
    assert len({link.number for link in links}) == len(links)


def test_two_links_of_one_name_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="names of transforms must differ"):
        bind(Chain(Chain(Scale(1.0), name="Scale_2"), Scale(1.0), Scale(1.0)))


def test_the_values_of_a_group_are_in_the_kind_of_their_fields_and_nested_as_links_are() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    opt = Modular([p], Masked(ClipNorm(1.0), lambda name, p: True), WeightDecay(0.5))
    group = {**opt.param_groups[0], "max_norm": 3, "weight_decay": 1}
    masked, decay = opt.links
    assert repr(masked.values(group)["ClipNorm"]["max_norm"]) == "3.0"
    assert decay.values(group)["weight_decay"] == 1.0


def test_state_that_is_shaped_like_a_parameter_is_told_from_numbers() -> None:
    (link,) = bind(Chain(Adam()))
    for shape in ((), (3,), (2, 2)):
        assert link.state_names(torch.zeros(shape)) == {
            "step": False,
            "exp_avg": True,
            "exp_avg_sq": True,
        }


def test_an_init_without_a_return_is_an_error() -> None:
    class Forgets(Transform):
        def init(self, param: torch.Tensor) -> Any:
            zeros_like_state(param)

    (link,) = bind(Chain(Forgets()))
    with pytest.raises(TypeError, match=r"Forgets\.init must return a dict, got None"):
        link.state_names(torch.zeros(2))


def test_narrow_state_is_what_is_shaped_and_of_float32() -> None:
    wide, narrow = bind(Chain(Adam())), bind(Chain(Adam()), narrow=True)
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    assert not wide[0].rounds(single)
    assert narrow[0].rounds(single)
    made = narrow[0].new_state(single)
    assert made["Adam/exp_avg"].dtype == torch.bfloat16
    assert made["Adam/step"].dtype == torch.float32
    assert narrow[0].new_state(double)["Adam/exp_avg"].dtype == torch.float64
