"""A name that a rule reads in vain is named, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Group,
    Live,
    Masked,
    Modular,
    NormRule,
    State,
    TensorList,
    TensorwiseTransform,
    Transform,
)

ENGINES = pytest.mark.parametrize("engine", [{"fused": False}, {}, {"compile": True}], ids=str)
TABLE = {"known": 1.0}


class UnannotatedGain(Transform):
    gain = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["gain"])


class FixedGain(Transform):
    gain: float = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["gain"])


class MisspelledGain(Transform):
    gain: Live[float] = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["gian"])


class MisspelledState(Transform):
    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"average": torch.zeros_like(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return state["avrage"].lerp_(u, 0.1)


class RateOfAnother(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["lr"])


class MisspelledLimit(NormRule):
    limit_at: Live[float] = 1.0

    def limit(self, norm: Tensor, state: dict[str, Tensor], group: Group) -> Any:
        return norm.clamp(max=group["limit_it"])


class MisspelledAverage(NormRule):
    def init_unit(self) -> dict[str, float]:
        return {"average": 0.0}

    def limit(self, norm: Tensor, state: dict[str, Tensor], group: Group) -> Any:
        return norm

    def observe(self, norm: Tensor, clipped: Tensor, state: Any, group: Group) -> dict[str, Tensor]:
        return {"average": state["avrage"]}


class MisspelledInTensor(TensorwiseTransform):
    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return u * group["nothing_like_it"]


class MisspelledCount(Transform):
    def init_group(self) -> dict[str, float]:
        return {"count": 0.0}

    def advance_group(self, numbers: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
        return {"count": numbers["cuont"] + 1}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u


def step(rule: Transform, **engine: Any) -> None:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    Modular([("p", p)], rule, LR(0.1), **engine).step()


CASES: dict[Callable[[], Transform], tuple[str, ...]] = {
    UnannotatedGain: (
        "the key 'gain' is neither in state, which has [], nor in group, which has ",
        "annotation to be an argument: write gain: Live[float] = 0.9",
    ),
    FixedGain: ("read self.gain instead, or annotate the field gain with Live[...]",),
    MisspelledGain: ("the key 'gian'", "['gain', 'grads', 'params']: did you mean 'gain'?"),
    MisspelledState: ("neither in state, which has ['average']", "did you mean 'average'?"),
    RateOfAnother: ("to read lr of another transform, write reads = ('lr',) in the class",),
    MisspelledLimit: ("the key 'limit_it'", "did you mean 'limit_at'?"),
    MisspelledAverage: ("the key 'avrage'", "did you mean 'average'?"),
    MisspelledInTensor: ("the key 'nothing_like_it'",),
    MisspelledCount: ("the key 'cuont'", "did you mean 'count'?"),
}


@ENGINES
@pytest.mark.parametrize("inside", [False, True], ids=["top", "inside"])
@pytest.mark.parametrize("rule", CASES)
def test_a_name_that_is_read_in_vain_is_named(
    rule: type[Transform], inside: bool, engine: dict[str, Any]
) -> None:
    link = Masked(rule(), lambda name, p: True) if inside else rule()
    with pytest.raises(KeyError) as caught:
        step(link, **engine)
    said = str(caught.value)
    assert said.startswith(f"{'Masked/' * inside}{rule.__name__}: the key '")
    assert [words for words in CASES[rule] if words not in said] == []
    assert isinstance(caught.value.__cause__, KeyError)


class OwnTable(Transform):
    gain: Live[float] = 0.9

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(TABLE["gain"])


@ENGINES
def test_a_name_that_its_group_has_is_another_ones_error(engine: dict[str, Any]) -> None:
    with pytest.raises(KeyError) as caught:
        step(OwnTable(), **engine)
    assert type(caught.value) is KeyError
    assert caught.value.args == ("gain",)


class NewState(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        state["new"] = u
        return u


class NewStatistic(NormRule):
    def init_unit(self) -> dict[str, float]:
        return {"average": 0.0}

    def limit(self, norm: Tensor, state: dict[str, Tensor], group: Group) -> Any:
        return norm

    def observe(self, norm: Tensor, clipped: Tensor, state: Any, group: Group) -> dict[str, Tensor]:
        return {"new": norm}


@pytest.mark.parametrize("rule", [NewState(), NewStatistic()], ids=repr)
def test_the_librarys_own_message_about_a_key_is_the_whole_message(rule: Transform) -> None:
    with pytest.raises(KeyError) as caught:
        step(rule)
    assert str(caught.value).startswith(type(rule).__name__ + ".")
    assert str(caught.value).endswith("]")


class ReturnsNothing(TensorwiseTransform):
    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        u.mul_(2.0)
        return None  # type: ignore[return-value]


@ENGINES
def test_a_rule_of_one_tensor_that_returns_nothing_is_named(engine: dict[str, Any]) -> None:
    words = "ReturnsNothing.update_tensor must return a tensor, got None"
    with pytest.raises(TypeError, match=re.escape(words)):
        step(ReturnsNothing(), **engine)


class OtherTable(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(TABLE["depth 3"])


def test_the_error_mentions_that_the_key_may_be_from_another_dict() -> None:
    with pytest.raises(KeyError, match=r"the key 'depth 3' is .* from another dict, this dict"):
        step(OtherTable())


def test_an_attribute_without_annotation_is_no_argument_and_the_error_says_so() -> None:
    words = (
        r"UnannotatedGain: there is no argument 'gain': the class attribute gain needs an "
        r"annotation to be an argument: write gain: Live\[float\] = 0.9 in the class"
    )
    with pytest.raises(TypeError, match=words):
        UnannotatedGain(gain=0.5)  # type: ignore[call-arg]
