"""Link: a transform at its place in an optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group
from torchzero_clip.core.state import state_dtype, statistic

GIVEN = ("step", "loss", "grads", "param")
"""What a transform may read in `group` that is no live value."""


class Link:
    """A transform at its place: the path that names its state, and its keys in `param_groups`.

    Args:
        transform: A Transform, or a Description that one holds, such as a criterion.
        path: The names from the chain to here, as in "Masked/ClipNorm".
        children: The links of the descriptions inside the transform.
        narrow: Whether float32 state in the shape of a parameter is kept in bfloat16.
    """

    def __init__(
        self, transform: Any, path: str, children: tuple[Link, ...], narrow: bool = False
    ) -> None:
        self.transform = transform
        # what buckets are sent through; `release` and `explain` put another here
        self.acts = transform
        self.path, self.number = path, zlib.crc32(path.encode())
        self.children = children
        self.transforms = hasattr(transform, "step")  # buckets are sent through no other
        self.numbered = self.transforms and (
            "loss" in transform.reads or bool(numbers_of_model(transform) | transform.init_group())
        )
        self.narrow = narrow
        self.keys: dict[str, str] = {}  # field -> key in param_groups; filled by GroupKeys
        self.read: dict[str, Link] = {}  # live value of another -> the link that owns it
        self.tops: tuple[Link, ...] = ()  # the links of the whole chain; filled by `bind`
        self._state_names: dict[Any, dict[str, bool]] = {}

    def walk(self) -> Iterator[Link]:
        """This link and all inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def values(self, settings: Mapping[str, Any]) -> Group:
        """Return the live values in one group; values of links inside are under their names."""
        values = {name: settings[key] for name, key in self.keys.items()}
        for name, owner in self.read.items():
            values[name] = settings[owner.keys[name]]
        if int in map(type, values.values()):
            self._make_floats(values)
        for name, other, at in self.transform.borrows:
            if values[name] is None:
                values[name] = values[other] if at is None else values[other][at]
        for child in self.children:
            values[child.path.rpartition("/")[2]] = child.values(settings)
        return values

    def _make_floats(self, values: Group) -> None:
        """Make integers floats where a float is annotated, since 1 means 1.0 there."""
        for name in [name for name, value in values.items() if type(value) is int]:
            kind = self.read.get(name, self).transform._kinds.get(name)
            if kind is not None and kind.python_type is float:
                values[name] = float(values[name])

    def check_names(self, what: str, made: Any, known: Mapping[str, Any]) -> None:
        """Raise a sentence unless what a method returned is a dict with names that are known."""
        if not (isinstance(made, Mapping) and made.keys() <= known.keys()):
            raise KeyError(
                f"{self.path}: the {what} must be a dict with names of {list(known)}, got {made!r}"
            )

    # ------------------------------------------------------------------ its state

    def state_names(self, param: Tensor) -> dict[str, bool]:
        """The names that `init` makes for a parameter, and whether their tensors have its shape.

        A number has the shape of one without dims too, so an example with many is asked first.
        """
        kind = param.shape, param.dtype
        if kind not in self._state_names:
            mine = self._names(torch.empty(param.shape, dtype=param.dtype, device="meta"))
            try:
                usual = self._names(torch.empty(2, 3, 5, 7, dtype=param.dtype, device="meta"))
            except Exception:  # a rule for matrices alone, say
                usual = {}
            self._state_names[kind] = {name: usual.get(name, like) for name, like in mine.items()}
        return self._state_names[kind]

    def _names(self, example: Tensor) -> dict[str, bool]:
        return {
            name: isinstance(value, Tensor) and value.shape == example.shape
            for name, value in self.acts.init(example).items()
            if value is not None
        }

    def rounds(self, param: Tensor) -> bool:
        """Whether it has state in the shape of a parameter that is kept in bfloat16."""
        return self.narrow and self.transforms and any(self.state_names(param).values())

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of one parameter that `init` makes, under its full keys."""
        return self._full(self.acts.init(param), param)

    def layout(self, param: Tensor) -> dict[str, Tensor]:
        """The state that the link may have for one parameter, as tensors without memory."""
        if not self.transforms:
            return {}
        thin = torch.empty_like(param, device="meta")
        return self._full(self.acts.per_parameter(thin), thin)

    def group_values(self) -> dict[str, Any]:
        """The values that the link's state in the chain dict of a group begins with."""
        return self.acts.per_group() if self.transforms else {}

    def _full(self, made: Mapping[str, Any], param: Tensor) -> dict[str, Tensor]:
        full = {
            f"{self.path}/{name}": _widened(statistic(value, param), param)
            for name, value in made.items()
            if value is not None
        }
        for name, like_params in self.state_names(param).items() if self.narrow else ():
            key = f"{self.path}/{name}"
            narrows = like_params and self.transform.state_kinds.get(name) != "weights"
            if narrows and full[key].dtype == torch.float32:
                full[key] = full[key].to(torch.bfloat16)
        return full


def _widened(value: Tensor, param: Tensor) -> Tensor:
    """Return state in float32 that `init` made in the half precision of its parameter.

    `torch.zeros_like(param)` makes such state, in which an average stalls.
    """
    return value.to(state_dtype(param)) if value.dtype == param.dtype else value


def numbers_of_model(tfm: Any) -> dict[str, float]:
    """The numbers that are kept once for all groups: those of `init_model`, and the count."""
    return {**({"step": 0.0} if "step" in tfm.reads else {}), **tfm.init_model()}


def read_elsewhere(tfm: Any) -> list[str]:
    """The live values of other links that a transform reads."""
    borrowed = [other for name, other, _ in tfm.borrows if getattr(tfm, name) is None]
    return borrowed + [name for name in getattr(tfm, "reads", ()) if name not in GIVEN]
