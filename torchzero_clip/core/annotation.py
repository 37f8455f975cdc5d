"""Annotations of fields: they tell which fields are live, and which values a field allows.

A live field is a hyperparameter that parameter groups and schedulers can change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from torchzero_clip.core.bounds import Within
from torchzero_clip.core.plurals import counted

T = TypeVar("T")

MARK = "torchzero_clip.Live"
NAMES = re.compile(
    r"\b(Live|Within|Finite|NonNegative|Positive|AboveZero|Threshold|AtLeastOne|Share|"
    r"Fraction|Whole|Count)\b"
)
Live = Annotated[T, MARK]
"""The annotation of a live hyperparameter, such as `beta: Live[float]`.

The optimizer stores it in `param_groups` and reads it in every step, so parameter groups and
schedulers can change it. Other fields are fixed at construction.
"""


class Allowed(NamedTuple):
    """The values that a field allows.

    Attributes:
        python_type: float, int, bool or Callable.
        optional: Whether None is allowed as well.
        bounds: The bounds of the number.
        length: The number of elements if the value is a tuple. The other attributes then describe
            each element.
        choices: The allowed values, if the annotation lists all of them. The other attributes are
            then not used.
    """

    python_type: Any = None
    optional: bool = False
    bounds: Within | None = None
    length: int | None = None
    choices: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"one of {list(self.choices)}"
        if self.python_type is bool:
            return "True, False or None" if self.optional else "True or False"
        finite = "finite " if self.bounds and self.bounds.excludes_infinity else ""
        usual = f"a {finite}number"
        kind = {int: "an integer", Callable: "a function"}.get(self.python_type, usual)
        bounds = str(self.bounds or "")
        if self.length is not None:
            kind = counted(self.length, f"{finite}number")
            if bounds:
                kind += ", each"
        if bounds:
            kind += f" {bounds}"
        return f"{kind} or None" if self.optional else kind

    def error(self, value: Any) -> type[Exception] | None:
        """Return the class of the error to raise for a value, or None if the value is allowed."""
        if self.length is not None:
            return self._error_of_tuple(value, self.length)
        if self.optional and value is None:
            return None
        if self.choices:
            same = [value is x or (type(value) is type(x) and value == x) for x in self.choices]
            return None if any(same) else ValueError
        if self.python_type is Callable:
            return None if callable(value) else TypeError
        if self.python_type is bool:
            return None if isinstance(value, bool) else TypeError
        if isinstance(value, Tensor) and value.numel() == 1:
            if value.device.type != "cpu" or torch.compiler.is_compiling():
                return None  # to read the value would synchronize with the device
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, self.python_type)):
            return TypeError
        if isinstance(value, int) and not self._fits(value):
            return ValueError
        return None if (self.bounds or Within()).holds(value) else ValueError

    def _error_of_tuple(self, value: Any, length: int) -> type[Exception] | None:
        if not isinstance(value, (tuple, list)):
            return TypeError
        if len(value) != length:
            return ValueError
        errors = [self._replace(length=None).error(x) for x in value]
        return next(filter(None, errors), None)

    def _fits(self, value: int) -> bool:
        """Return whether torch can store an integer in the type of the annotation."""
        if self.python_type is int:
            return -(2**63) <= value < 2**63
        try:
            float(value)
        except OverflowError:
            return False
        return True


def read(cls: type, name: str, hint: Any) -> tuple[bool, Allowed | None]:
    """Return whether a field is live, and the values that its annotation allows.

    The second value is None if the library cannot check the annotation.
    """
    hint = _evaluated(cls, hint)
    inside = list(_leaves(hint))
    live = MARK in _marks(hint)
    field = f"{cls.__name__}: the annotation of '{name}'"
    unread = isinstance(hint, str) and NAMES.search(hint)
    if unread or (live and any([hasattr(x, "__forward_arg__") for x in inside])):
        raise TypeError(
            f"{field}, {hint}, cannot be evaluated: import or define all names in the "
            "annotation at the top of the module, not only under TYPE_CHECKING"
        )
    if not live and any([x is MARK for x in inside]):
        raise TypeError(
            f"{field} must begin with Live, for example Live[float | None] instead of "
            "Live[float] | None"
        )
    kind = kind_of(hint)
    if kind is None and any([isinstance(x, Within) for x in inside]):
        raise TypeError(
            f"{field} has bounds that the library cannot check, got {hint}. Put bounds only "
            "on a number, on an optional number, or on all elements of a tuple, such as "
            "tuple[Share, Share]"
        )
    return live, kind


def _evaluated(cls: type, hint: Any) -> Any:
    """Return an annotation after all strings inside the annotation are evaluated.

    If a name is not defined in the module of the class, the annotation is returned unchanged. Under
    `from __future__ import annotations`, a quoted annotation is a string inside a string.
    """
    if isinstance(hint, str) or any([hasattr(x, "__forward_arg__") for x in _leaves(hint)]):
        asked = SimpleNamespace(__annotations__={"field": hint})
        names = dict(vars(sys.modules[cls.__module__])), dict(vars(cls))
        with suppress(Exception):
            return get_type_hints(asked, *names, include_extras=True)["field"]
    return hint


def kind_of(hint: Any) -> Allowed | None:
    """Return the values that an annotation allows, or None if the library cannot check them.

    The library can check float, int, bool, Callable and Literal. It can also check tuples whose
    elements all have the same bounds.
    """
    inner, outer_bounds = _apart(hint)
    options = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
    types = [option for option in options if option is not type(None)]
    if len(types) != 1:
        return None
    python_type, bounds = _apart(types[0])
    bounds = bounds or outer_bounds
    optional = len(options) > 1
    if get_origin(python_type) is Literal:
        choices = get_args(python_type)
        return Allowed(optional=optional, choices=(None, *choices) if optional else choices)
    if Callable in (python_type, get_origin(python_type)):
        return Allowed(Callable, optional)
    if python_type in (float, int, bool):
        return Allowed(python_type, optional, bounds)
    if get_origin(python_type) is not tuple:
        return None
    elements = [kind_of(x) for x in get_args(python_type)]
    known = {kind and kind._replace(optional=False) for kind in elements}
    element = known.pop() if len(known) == 1 else None
    if element is None or element.bounds is None:
        return None
    optional = any([kind is not None and kind.optional for kind in elements])
    return element._replace(optional=optional, length=len(elements))


def _apart(hint: Any) -> tuple[Any, Within | None]:
    """Return a type without the metadata of `Annotated`, and the bounds in this metadata."""
    bounds = [mark for mark in _marks(hint) if isinstance(mark, Within)]
    return hint.__origin__ if _marks(hint) else hint, next(iter(bounds), None)


def _marks(hint: Any) -> tuple[Any, ...]:
    """Return the metadata that `Annotated` adds to a type."""
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield an annotation and everything inside it."""
    yield hint
    for inner in get_args(hint):
        yield from _leaves(inner)
