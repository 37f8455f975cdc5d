"""A link: a transform at its place in an optimizer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group
from torchzero_clip.core.names import UnknownKey
from torchzero_clip.core.state import state_dtype, statistic

NO_HYPERPARAMETERS = ("step", "loss", "grads", "param")
"""The names in `reads` that are not hyperparameters of another link."""


class Link:
    """A link: a transform at its place in a chain.

    The place determines the names of the link's state, and its keys in parameter groups.

    Args:
        transform: A Transform, or another Description inside a transform, such as a criterion.
        path: The names from the chain to this link, such as "Masked/ClipNorm".
        children: The links of the descriptions inside the transform.
        narrow: Whether float32 state in the shape of the parameters is stored in bfloat16.
    """

    def __init__(
        self, transform: Any, path: str, children: tuple[Link, ...], narrow: bool = False
    ) -> None:
        self.transform = transform
        # the object that buckets are sent through; `release` and `explain` replace it
        self.acts = transform
        self.path = path
        self.number = zlib.crc32(path.encode())
        self.children = children
        self.transforms = hasattr(transform, "step")  # buckets are sent through no other objects
        self.is_guard = getattr(transform, "place", "") == "first"
        self.numbered = self.transforms and (
            "loss" in transform.reads or bool(scalars_of_model(transform) | transform.init_group())
        )
        self.narrow = narrow
        self.keys: dict[str, str] = {}  # field -> key in param_groups; filled by GroupKeys
        self.read: dict[str, Link] = {}  # hyperparameter of another link -> that link
        # the path and the transform of each link of the whole chain; filled by `bind`. The links
        # themselves would be a reference cycle, and only the garbage collector would free them
        self.tops: tuple[tuple[str, Any], ...] = ()
        self._state_names: dict[Any, dict[str, bool]] = {}

    def walk(self) -> Iterator[Link]:
        """Yield this link and all links inside it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def values(self, settings: Mapping[str, Any]) -> Group:
        """Return the live values in one group. The values of an inner link are under its name."""
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

    def fixed(self) -> dict[str, Any]:
        """Return the arguments that are fixed for all groups, by name and by path and name.

        The key "name" is missing, because it is the name of a group.
        """
        names = [x for x in self.transform.__dataclass_fields__ if x not in self.transform.live]
        values = {name: getattr(self.transform, name) for name in names}
        qualified = {f"{self.path}/{name}": value for name, value in values.items()}
        values.pop("name", None)
        return values | qualified

    def _make_floats(self, values: Group) -> None:
        """Convert an integer to a float if the annotation is float."""
        for name in [name for name, value in values.items() if type(value) is int]:
            kind = self.read.get(name, self).transform._kinds.get(name)
            if kind is not None and kind.python_type is float:
                values[name] = float(values[name])

    def check_names(self, what: str, made: Any, known: Mapping[str, Any]) -> None:
        """Raise UnknownKey unless the result of a rule's method is a dict with known names."""
        if not (isinstance(made, Mapping) and made.keys() <= known.keys()):
            raise UnknownKey(
                f"{self.path}: the {what} must be a dict whose keys are among {list(known)}, got "
                f"{made!r}"
            )

    # ------------------------------------------------------------------ its state

    def state_names(self, param: Tensor) -> dict[str, bool]:
        """Return the names that `init` makes, and whether each tensor has the parameter's shape.

        For a parameter without dims, a scalar also has the parameter's shape. So this method first
        calls `init` with an example parameter of four dims.
        """
        kind = param.shape, param.dtype
        if kind not in self._state_names:
            names = self._names(torch.empty(param.shape, dtype=param.dtype, device="meta"))
            try:
                usual = self._names(torch.empty(2, 3, 5, 7, dtype=param.dtype, device="meta"))
            except Exception:  # for example a rule that accepts only matrices
                usual = {}
            self._state_names[kind] = {name: usual.get(name, like) for name, like in names.items()}
        return self._state_names[kind]

    def _names(self, example: Tensor) -> dict[str, bool]:
        made = self.acts.init(example)
        if not isinstance(made, Mapping):
            raise TypeError(
                f"{type(self.transform).__name__}.init must return a dict, got {made!r}"
            )
        return {
            name: isinstance(value, Tensor) and value.shape == example.shape
            for name, value in made.items()
            if value is not None
        }

    def rounds(self, param: Tensor) -> bool:
        """Return whether the link stores state in the shape of a parameter in bfloat16."""
        return self.narrow and self.transforms and any(self.state_names(param).values())

    def new_state(self, param: Tensor, name: str = "") -> dict[str, Tensor]:
        """Return the state that `init` makes for one parameter, under its full keys."""
        return self._full(self.acts._init_named(name, param), param)

    def layout(self, param: Tensor, name: str = "") -> dict[str, Tensor]:
        """Return all state that the link may have for one parameter, as tensors without memory."""
        if not self.transforms:
            return {}
        thin = torch.empty_like(param, device="meta")
        return self._full(self.acts.per_parameter(thin, name), thin)

    def group_values(self) -> dict[str, Any]:
        """Return the initial values of the link's state in the chain dict of a group."""
        return self.acts.per_group() if self.transforms else {}

    def _full(self, made: Mapping[str, Any], param: Tensor) -> dict[str, Tensor]:
        """Return state under its full keys, in the dtypes for storage."""
        full: dict[str, Tensor] = {}
        like_params = self.state_names(param) if self.narrow else {}
        for name, value in made.items():
            if value is None:
                continue
            t = statistic(value, param)
            if t.dtype == param.dtype:
                t = t.to(state_dtype(param))  # averages stall in half precision
            narrows = like_params.get(name) and self.transform.state_kinds.get(name) != "weights"
            if narrows and t.dtype == torch.float32:
                t = t.to(torch.bfloat16)
            full[f"{self.path}/{name}"] = t
        return full


def scalars_of_model(tfm: Any) -> dict[str, float]:
    """Return the initial model-wide scalars of a transform, with its count of steps if used."""
    steps = {"step": 0.0} if "step" in tfm.reads else {}
    return {**steps, **tfm.init_model()}


def read_elsewhere(tfm: Any) -> list[str]:
    """Return the names of the hyperparameters of other links that a transform reads."""
    borrowed = [other for name, other, _ in tfm.borrows if getattr(tfm, name) is None]
    reads = getattr(tfm, "reads", ())
    return borrowed + [name for name in reads if name not in NO_HYPERPARAMETERS]
