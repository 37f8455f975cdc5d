"""A rule that reads a live value from `self` is refused when its class is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    LR,
    Criterion,
    Group,
    Live,
    Modular,
    NormRule,
    State,
    TensorList,
    TensorwiseTransform,
    Transform,
    UnitState,
)
from torchzero_clip.core import Description
from torchzero_clip.core.live_reads import GIVEN_GROUP, attributes_of


def made(base: type, **body: Any) -> type:
    """A class with a live gain, a fixed power, and these attributes."""
    fields = {"__annotations__": {"gain": Live[float], "power": float}, "gain": 1.0, "power": 2.0}
    return type("Gained", (base,), {**fields, **body})


def plainly(self, u, state, group):
    return u.mul_(self.gain)


def in_a_comprehension(self, u, state, group):
    return TensorList([t * self.gain for t in u])


def in_an_inner_function(self, u, state, group):
    def scaled(t):
        return t * self.gain

    return u.map(scaled)


def in_a_lambda(self, u, state, group):
    return u.map(lambda t: t.mul(self.gain))


def as_two_arguments(self, u, state, group):
    return (u, self.gain)[0]


def in_a_condition(self, u, state, group):
    return u if self.gain == 0 else u.mul_(group["gain"])


def under_another_name(rule, u, state, group):
    return u.mul_(rule.gain)


@torch.no_grad()
def decorated(self, u, state, group):
    return u.mul_(self.gain)


@pytest.mark.parametrize(
    "update",
    [
        plainly,
        in_a_comprehension,
        in_an_inner_function,
        in_a_lambda,
        as_two_arguments,
        in_a_condition,
        under_another_name,
        decorated,
    ],
)
def test_an_update_that_reads_a_live_value_from_self_is_refused(update):
    with pytest.raises(TypeError) as error:
        made(Transform, update=update)
    assert str(error.value) == (
        'Gained: update must read group["gain"] instead of self.gain, because '
        "self.gain ignores the values in parameter groups and the changes by schedules"
    )
    assert "Gained" not in Description.registry


def reads_gain(self, *args: Any) -> Any:
    return self.gain


@pytest.mark.parametrize("method", GIVEN_GROUP)
def test_every_method_that_receives_the_group_is_examined(method):
    base = TensorwiseTransform if "tensor" in method or "matrix" in method else NormRule
    with pytest.raises(
        TypeError, match=rf"Gained: {method} must read group\[\"gain\"\] instead of self\.gain"
    ):
        made(base, **{method: reads_gain})


@pytest.mark.parametrize("method", ["limit", "observe"])
def test_so_are_those_of_a_criterion(method):
    with pytest.raises(
        TypeError, match=rf"Gained: {method} must read group.* instead of self\.gain"
    ):
        made(Criterion, **{method: reads_gain})


def test_the_list_has_every_method_of_a_base_class_that_receives_the_group():
    bases = (Transform, TensorwiseTransform, NormRule, Criterion)
    methods = {name: f for base in bases for name, f in vars(base).items() if inspect.isfunction(f)}
    given = {name for name, f in methods.items() if "group" in inspect.signature(f).parameters}
    verbs = {"dot", "total", "of_shapes"}  # what a rule calls, and does not write
    assert given - verbs == set(GIVEN_GROUP)


def test_a_class_without_source_is_examined_too():
    """As one of an interactive session, where there is no file to read."""
    code = """
class Typed(Transform):
    gain: Live[float] = 1.0

    def update(self, u, state, group):
        return u.mul_(self.gain)
"""
    with pytest.raises(TypeError, match=r"Typed: update must read group.* instead of self\.gain"):
        exec(code, {"Transform": Transform, "Live": Live, "__name__": __name__})


def test_an_inherited_update_is_examined_where_its_field_becomes_live():
    class Fixed(Transform):
        gain: float = 1.0

        def update(self, u: TensorList, state: State, group: Group) -> TensorList:
            return u.mul_(self.gain)

    with pytest.raises(
        TypeError, match=r"Scheduled: update must read group.* instead of self\.gain"
    ):

        class Scheduled(Fixed):
            gain: Live[float] = 1.0


class Right(NormRule):
    """Reads the fixed fields from itself, and the live one in `check` and where no group is."""

    gain: Live[float] = 1.0
    power: float = 2.0

    def check(self) -> None:
        super().check()
        if self.gain > 100:
            raise ValueError("gain must be at most 100")

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"start": torch.full_like(param, self.gain)}

    def init_unit(self) -> dict[str, float]:
        return {"seen": self.gain}

    @property
    def doubled(self) -> float:
        return 2 * self.gain

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        """The limit; it doesn't read self.gain."""
        gain = group["gain"]
        held = [lambda self=norm: self.gain]  # its own self
        assert held
        return norm.pow(self.power).mul(gain)


class Holder:
    gain = 2.0


class AlsoRight(Transform):
    """Reads the attribute of this name of others."""

    gain: Live[float] = 1.0
    other: Any = Holder

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        class Inner:
            gain = 3.0

            def read(self) -> float:
                return self.gain

        by = Holder.gain * self.other.gain * Inner().read() * group["gain"]
        return u.mul_(by)


class FixedAgain(AlsoRight):
    """A subclass may fix what was live."""

    gain: float = 0.5

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(self.gain)


def test_uses_that_are_right_are_no_error():
    assert Right(3.0).doubled == 6.0
    p = Parameter(torch.zeros(2))
    opt = Modular([p], AlsoRight(0.5), LR(1.0))
    p.grad = torch.ones(2)
    opt.step()
    assert p.tolist() == [-6.0, -6.0]
    assert FixedAgain.live == ()


def subclasses(cls: type) -> Iterator[type]:
    for inner in cls.__subclasses__():
        yield inner
        yield from subclasses(inner)


def functions(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods that a class itself has, and what its properties call."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else value
        if inspect.isfunction(function) and name not in ("__init__", "check"):
            yield name, function


def test_no_method_of_our_rules_reads_a_live_value_from_self():
    """Not even those without a group, which may be called by those with one."""
    found = {
        f"{cls.__name__}.{name}: {read}"
        for cls in subclasses(Description)
        if cls.__module__.startswith("torchzero_clip.modules.")  # `grads` makes rules for one call
        for name, function in functions(cls)
        for read in attributes_of(function.__code__, "self", set(cls.live))
    }
    assert not found
