"""Values: the arguments of a description, as Python's own, compared, and printed."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeGuard

from torch import Tensor

LONGEST_SHOWN = 63  # bits of an integer that an error message shows digit by digit


def is_row(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence, of whatever kind, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def python_number(value: Any) -> Any:
    """Numbers of numpy and the like, and what holds them, as Python's own; all else as it is.

    Python's own are saved, compared and printed in one way, and torch loads them with weights_only.
    A sequence of another kind, as Hydra's, becomes a tuple, and such a mapping a dict.
    """
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return {key: python_number(x) for key, x in value.items()}
    if is_row(value) and not isinstance(value, (tuple, list)):
        return tuple(map(python_number, value))
    if type(value) in (tuple, list):
        made = [python_number(x) for x in value]
        return value if all(map(operator.is_, made, value)) else type(value)(made)
    own = type(value) in (int, float, bool) or isinstance(value, Enum)
    if own or not isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    try:
        return float(value)
    except OverflowError:  # a fraction that no float can hold, which the check refuses by its name
        return value


def live_value(value: Any) -> Any:
    """Return a value as it is kept in `param_groups`: Python's own numbers, and tuples for lists.

    Live values are checked when a group holds another object, so none may change in place.
    """
    value = python_number(value)
    if not isinstance(value, list) and type(value) is not tuple:
        return value
    entries = tuple(map(live_value, value))
    unchanged = isinstance(value, tuple) and all(map(operator.is_, entries, value))
    return value if unchanged else entries


def equal(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, of the same type; tensors change, so they must be one."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is b or type(a) is not type(b) or isinstance(a, Tensor):
        return a is b
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a value is the default of its field."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)


def shown(value: Any) -> str:
    """A value as it is written in Python."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, Tensor):
        return repr(value.item())
    if callable(value) and not hasattr(value, "with_values"):  # descriptions show themselves
        if inspect.isbuiltin(value):  # the qualified name of torch.tanh is not one to call it by
            return f"{value.__module__}.{value.__name__}"
        return str(getattr(value, "__qualname__", repr(value)))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(shown(v) for v in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def got(value: Any) -> str:
    """Return a value as an error message shows it."""
    if isinstance(value, int) and value.bit_length() > LONGEST_SHOWN:
        sign, end = ("an", ", which is too large") if value > 0 else ("a negative", "")
        return f"{sign} integer of {value.bit_length()} bits{end}"
    if type(value) is tuple:
        inner = ", ".join(map(got, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
