"""What `torchzero_clip.testing` accepts and refuses."""

from __future__ import annotations

from typing import Annotated, ClassVar

import pytest
from torch import Tensor

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Group,
    Guard,
    Lambda,
    Live,
    Masked,
    NormRule,
    RMSprop,
    State,
    TensorList,
    Transform,
    UnitState,
    Warmup,
    Within,
)
from torchzero_clip.testing import check_pure


class Pure(Transform):
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(0.5)


class Inherits(Pure):
    pass


class Counts(Transform):
    """It says that it is pure, and counts its calls."""

    pure = True
    calls: ClassVar[list[float]] = [0.0]

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        self.calls[0] += 1
        return u.mul_(self.calls[0])


class Looks(NormRule):
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return 1.0 if bool((norm > 0).all()) else 2.0


class Reads(NormRule):
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return max(norm.tolist()) / 2


class Points(NormRule):
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return norm.numpy().max() / 2 if norm.data_ptr() else norm


class Takes(Transform):
    """It takes a number of the gradient itself to the host, by a way that is no operator."""

    pure = True
    way: str

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        held = getattr(u.tensors[0], self.way)()
        return u.mul_(float(len(held)) if isinstance(held, str) else float(held.max()))


class Lists(Takes):
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(u.tensors[1].tolist()[0])


class AtItsBound(Transform):
    pure = True
    factor: Live[Annotated[float, Within(at_least=1)]] = 1.0

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.div_(group["factor"])


class Helped(Transform):
    """It reads the live value from itself, in a method that receives no group."""

    pure = True
    gain: Live[float] = 2.0

    def gained(self, u: TensorList) -> TensorList:
        return u.mul_(self.gain)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return self.gained(u)


class Half(Transform):
    """It uses one of two live values."""

    pure = True
    used: Live[float] = 2.0
    unused: Live[tuple[float, bool] | None] = None

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["used"])


def halved(t):
    return t / 2


halved.pure = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "chain",
    [
        [ClipNorm(1.0), Adam()],
        [Guard(), Adam()],
        [Pure()],
        [AtItsBound()],
        [ClipNorm(1e9), ClipNorm(2.0, name="Other")],
        [RMSprop(momentum=0.5, centered=True), Warmup(1000)],
    ],
)
def test_what_is_repeated_as_it_is_done_anew_passes(chain):
    check_pure(*chain, LR(0.1))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Inherits(), "Inherits does not set `pure = True`"),
        (Counts(), "if it is replayed from a recording, but"),
        (Looks(), "no step was replayed"),
        (Reads(), "no step was replayed"),
        (Points(), "no step was replayed"),
        (Lists("tolist"), "tolist copies a tensor to the CPU"),
        (Takes("numpy"), "numpy copies a tensor to the CPU"),
        (Takes("__array__"), "__array__ copies a tensor to the CPU"),
        (Takes("__repr__"), "__repr__ copies a tensor to the CPU"),
        (Lambda(halved), "Lambda: fn can be any function"),
    ],
)
def test_what_is_not_pure_is_found(rule, why):
    with pytest.raises(AssertionError, match=why):
        check_pure(rule, LR(0.1))


def test_a_live_value_that_changes_nothing_is_reported():
    with pytest.raises(AssertionError) as error:
        check_pure(ClipNorm(1.0), Helped(), LR(0.1))
    assert str(error.value) == (
        "Helped: the hyperparameter 'gain' has no effect: steps with 2.0, 1.0, 4.0, 1.02, "
        "0.5, 0.001, 1000.0 and 0.0 are equal. The class must read group['gain']. If the "
        "class uses gain only for certain parameters, pass shapes= of such parameters. If this "
        "chain does not use gain, pass idle=['gain']"
    )


def test_one_that_a_chain_does_not_use_is_named_by_who_calls():
    with pytest.raises(
        AssertionError, match=r"Half: the hyperparameter 'unused' has no effect: .*None"
    ):
        check_pure(Half(), LR(0.1))
    check_pure(Half(), LR(0.1), idle=["unused"])
    with pytest.raises(AssertionError, match=r"Half/used' has no effect: .* group\['used'\]"):
        check_pure(Half(), Masked(Half(), is_head), LR(0.1), idle=["Half/unused"])
    with pytest.raises(
        ValueError, match=r"idle= must contain only .* got 'unsued': did you mean 'unused'"
    ):
        check_pure(Half(), LR(0.1), idle=["unsued"])


def is_head(name: str, param: Tensor) -> bool:
    return name.startswith("head")


is_head.pure = True  # type: ignore[attr-defined]


def test_shapes_may_have_the_names_that_a_chain_selects():
    chain = [Masked(ClipNorm(1.0), is_head), LR(0.1)]
    with pytest.raises(AssertionError, match="Masked/ClipNorm: the hyperparameter 'max_norm'"):
        check_pure(*chain)
    check_pure(*chain, shapes={"body.weight": (3, 2), "head.weight": (3,)})


class Negative(NormRule):
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return 1 - norm


class Missing(NormRule):
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return (1 - norm).sqrt()


@pytest.mark.parametrize("rule", [Negative(), Missing()], ids=repr)
def test_a_limit_that_is_no_norm_is_an_error(rule: NormRule) -> None:
    name = type(rule).__name__
    words = f"check_pure: {name}.limit must return numbers of at least 0, got "
    with pytest.raises(AssertionError, match=words):
        check_pure(rule, LR(0.1))
