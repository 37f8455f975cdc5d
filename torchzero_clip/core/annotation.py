"""Annotations of fields: which are live, and what may stand in them."""

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

T = TypeVar("T")

MARK = "torchzero_clip.Live"
NAMES = re.compile(r"\b(Live|Within|NonNegative|Positive|AtLeastOne|Share|Fraction|Whole|Count)\b")
Live = Annotated[T, MARK]
"""`beta: Live[float]` is a hyperparameter that lives in `param_groups` and is read every step."""


class Allowed(NamedTuple):
    """What may stand in a field: a number, each in a tuple of `length`, a truth, a function, or one
    of some choices.
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
        bounds = str(self.bounds or "")
        kind = {int: "an integer", Callable: "a function"}.get(self.python_type, "a number")
        if self.length is not None:
            kind = f"{self.length} numbers" + ", each" * bool(bounds)
        return f"{kind} {bounds}".rstrip() + " or None" * self.optional

    def error(self, value: Any) -> type[Exception] | None:
        """The error that a value is, if it may not stand there."""
        if self.length is not None:
            if not isinstance(value, (tuple, list)):
                return TypeError
            errors = [self._replace(length=None).error(x) for x in value]
            return ValueError if len(value) != self.length else next(filter(None, errors), None)
        if self.optional and value is None:
            return None
        if self.choices:
            same = [value is x or (type(value) is type(x) and value == x) for x in self.choices]
            return None if any(same) else ValueError
        if self.python_type in (bool, Callable):
            fits = callable(value) if self.python_type is Callable else isinstance(value, bool)
            return None if fits else TypeError
        if isinstance(value, Tensor) and value.numel() == 1:
            if value.device.type != "cpu" or torch.compiler.is_compiling():
                return None  # reading it would wait for the device
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, self.python_type)):
            return TypeError
        if isinstance(value, int) and not self._fits(value):
            return ValueError
        return None if (self.bounds or Within()).holds(value) else ValueError

    def _fits(self, value: int) -> bool:
        """Whether torch can compute with an integer, as the type that the annotation names."""
        if self.python_type is int:
            return -(2**63) <= value < 2**63
        try:
            float(value)
        except OverflowError:
            return False
        return True


def read(cls: type, name: str, hint: Any) -> tuple[bool, Allowed | None]:
    """Whether a field is live, and what its annotation says may stand in it, if it does."""
    hint = _evaluated(cls, hint)
    inside = list(_leaves(hint))
    live, said = MARK in _marks(hint), f"{cls.__name__}: the annotation of '{name}'"
    unread = isinstance(hint, str) and NAMES.search(hint)
    if unread or (live and any([hasattr(x, "__forward_arg__") for x in inside])):
        raise TypeError(
            f"{said}, {hint}, cannot be evaluated, so that its bounds would not be checked: "
            "have all that it names at the top of the module, and not under TYPE_CHECKING alone"
        )
    if not live and any([x is MARK for x in inside]):
        raise TypeError(
            f"{said} has Live inside another type; write Live around the whole, as in "
            "Live[float | None]"
        )
    kind = kind_of(hint)
    if kind is None and any([isinstance(x, Within) for x in inside]):
        raise TypeError(
            f"{said}, {hint}, has bounds where none are checked: give them to a number, which may "
            "be None, or the same to each entry of a tuple, as in tuple[Share, Share]"
        )
    return live, kind


def _evaluated(cls: type, hint: Any) -> Any:
    """Return an annotation without text in it, if all that it names is in the module of the class.

    Under `from __future__ import annotations`, one that is quoted as well is text in text.
    """
    if isinstance(hint, str) or any([hasattr(x, "__forward_arg__") for x in _leaves(hint)]):
        asked = SimpleNamespace(__annotations__={"field": hint})
        names = dict(vars(sys.modules[cls.__module__])), dict(vars(cls))
        with suppress(Exception):
            return get_type_hints(asked, *names, include_extras=True)["field"]
    return hint


def kind_of(hint: Any) -> Allowed | None:
    """What an annotation says, where it says float, int, bool, Callable or Literal, or bounds in a
    tuple.
    """
    inner, outer = _apart(hint)
    options = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
    some = [option for option in options if option is not type(None)]
    if len(some) != 1:
        return None
    python_type, bounds = _apart(some[0])
    optional, bounds = len(options) > 1, bounds or outer
    if get_origin(python_type) is Literal:
        return Allowed(optional=optional, choices=(*[None] * optional, *get_args(python_type)))
    if Callable in (python_type, get_origin(python_type)):
        return Allowed(Callable, optional)
    if python_type in (float, int, bool):
        return Allowed(python_type, optional, bounds)
    each = [kind_of(x) for x in get_args(python_type)] if get_origin(python_type) is tuple else []
    known = {kind and kind._replace(optional=False) for kind in each}
    one = known.pop() if len(known) == 1 else None
    if one is None or one.bounds is None:
        return None
    optional = any([kind is not None and kind.optional for kind in each])
    return one._replace(optional=optional, length=len(each))


def _apart(hint: Any) -> tuple[Any, Within | None]:
    """A type without its marks, and the bounds among these."""
    bounds = [mark for mark in _marks(hint) if isinstance(mark, Within)]
    return hint.__origin__ if _marks(hint) else hint, next(iter(bounds), None)


def _marks(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _leaves(hint: Any) -> Iterator[Any]:
    """An annotation and all that stands in it."""
    yield hint
    for inner in get_args(hint):
        yield from _leaves(inner)
