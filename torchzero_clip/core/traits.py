"""Traits: additional base classes by which transforms of this library declare what they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Sometimes:
    """A transform that runs its inner transforms only in some steps."""


class Routing:
    """A transform that sends each parameter through some or none of its inner transforms.

    The routing transform returns the updates of the inner transforms unchanged.
    """

    one_way: ClassVar[bool] = True
    """Whether the inner transforms run one after another.

    Otherwise, each inner transform is for other parameters.
    """
    takes_all: ClassVar[bool] = False
    """Whether all parameters go through the inner transforms."""


def only_routes(tfm: Any) -> bool:
    """Return whether a transform only routes updates, as its base class with the trait `Routing`.

    A subclass with another `step` or `update` may also change updates.
    """
    cls = type(tfm)
    declaring = next((base for base in cls.__mro__ if Routing in base.__bases__), None)
    if declaring is None:
        return False
    methods = ("step", "update")
    return all([getattr(cls, name) is getattr(declaring, name) for name in methods])


class Gate:
    """A transform that drops parameters in some steps, and records which parameters have passed."""

    children_before_drop: ClassVar[int] = 0
    """How many of the inner transforms also receive the parameters that are dropped."""

    def passed(self, state: Mapping[str, Any]) -> bool:
        """Return whether a parameter has reached the links after this one.

        `state` is the state of the parameter at this link. When a checkpoint is loaded, the
        result decides whether missing state of later links is an error.
        """
        raise NotImplementedError


class Smoothing:
    """A transform that averages or sums the update over steps, such as momentum."""

    torch_names: ClassVar[Mapping[str, str]] = {}
    """A mapping from torch's names of hyperparameters to the names in this class, if they differ.

    If a parameter group has a key with torch's name, the error message suggests the name in this
    class.
    """

    def adopted(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a parameter's state from an optimizer of torch to the names of this link.

        `group` is the parameter group of that optimizer. `take_over` calls this method. The method
        raises ValueError if this link cannot use the state.
        """
        raise NotImplementedError


class Bounding:
    """A transform that bounds the absolute value of every element."""

    largest_entry: ClassVar[str | float]
    """The bound: a number, or the name of a live hyperparameter."""
