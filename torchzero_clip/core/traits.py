"""Traits: classes that a transform of this library inherits from as well, to say what it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Sometimes:
    """A transform whose inner transforms take no part in some steps."""


class Routing:
    """A transform that sends each parameter through the transforms inside, or past them.

    The updates that leave it are the updates that its inner transforms make, as they are.
    """

    one_way: ClassVar[bool] = True
    """Whether the transforms inside follow one another. If not, each is for other parameters."""
    takes_all: ClassVar[bool] = False
    """Whether all parameters go through the transforms inside."""


class Gate:
    """A transform that drops parameters in some steps, and notes which ones it has let through."""

    children_before_drop: ClassVar[int] = 0
    """How many of the transforms inside also see the parameters that are dropped."""

    def passed(self, state: Mapping[str, Any]) -> bool:
        """Whether links after this one have seen a parameter, by its state at this link.

        Loading asks, so that a checkpoint without the state of those links raises.
        """
        raise NotImplementedError


class Smoothing:
    """A transform that makes an average or a sum over steps of the update, as momentum is."""

    torch_names: ClassVar[Mapping[str, str]] = {}
    """For each name that torch's optimizers use for a live value of this transform, its own name.
    It is given where the two differ. An error about a group key with torch's name points to it."""

    def adopted(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a parameter in an optimizer of torch under the names of this link.

        `group` is the parameter group of that optimizer. `take_over` asks, and raises ValueError if
        this does.
        """
        raise NotImplementedError


class Bounding:
    """A transform after which no entry is larger than a bound."""

    largest_entry: ClassVar[str | float]
    """The bound: a number, or the name of the live value that is it."""
