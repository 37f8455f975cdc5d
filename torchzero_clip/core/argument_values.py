"""Functions that convert, compare and print the values of arguments."""

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
    """Return whether a value is a sequence of any class except text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def python_number(value: Any) -> Any:
    """Convert numbers of numpy and other libraries to Python numbers, also inside containers.

    Python numbers always compare and print in the same way. torch can load Python numbers with
    `weights_only=True`. Sequences of other libraries, such as Hydra's, become tuples. Mappings of
    other libraries become dicts. All other values are returned unchanged.
    """
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return {key: python_number(x) for key, x in value.items()}
    if is_row(value) and not isinstance(value, (tuple, list)):
        return tuple(map(python_number, value))
    if type(value) in (tuple, list):
        converted = [python_number(x) for x in value]
        return value if all(map(operator.is_, converted, value)) else type(value)(converted)
    if type(value) in (int, float, bool) or isinstance(value, Enum):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # a fraction too large for a float; the check of the field refuses it
            return value
    return value


def live_value(value: Any) -> Any:
    """Return a value as `param_groups` stores it: with Python numbers, and tuples for lists.

    The library checks a live hyperparameter again only when the group holds another object. A
    change in place would not be checked. So the object in a group must be immutable.
    """
    value = python_number(value)
    if not isinstance(value, list) and type(value) is not tuple:
        return value
    elements = tuple(map(live_value, value))
    unchanged = isinstance(value, tuple) and all(map(operator.is_, elements, value))
    return value if unchanged else elements


def equal(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal and of the same type.

    Tensors can change in place. So two tensors are equal only if they are the same object.
    """
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is b or type(a) is not type(b) or isinstance(a, Tensor):
        return a is b
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def agree(a: Any, b: Any) -> bool:
    """Return whether two arguments are equal. An integer may be equal to a float."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b
    return equal(a, b)


def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return whether a value is the default of its field."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)


def shown(value: Any) -> str:
    """Return a value as Python code, for the `repr` of a description."""
    if isinstance(value, Enum):
        name = type(value).__qualname__
        is_member = value.name in type(value).__members__  # a combination of flags is no member
        return f"{name}.{value.name}" if is_member else f"{name}({value.value!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else repr(value)
    if callable(value) and not hasattr(value, "with_values"):  # descriptions have a repr
        if inspect.isbuiltin(value):  # the qualified name of torch.tanh does not lead to it
            return f"{value.__module__}.{value.__name__}"
        return str(getattr(value, "__qualname__", repr(value)))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, tuple):
        return _in_parentheses([shown(x) for x in value])
    return repr(value)


def got(value: Any) -> str:
    """Return a value as an error message shows it."""
    if isinstance(value, int) and value.bit_length() > LONGEST_SHOWN:
        bits = f"integer of {value.bit_length()} bits"
        return f"an {bits}, which is too large" if value > 0 else f"a negative {bits}"
    if type(value) is tuple:
        return _in_parentheses([got(x) for x in value])
    return repr(value)


def _in_parentheses(elements: list[str]) -> str:
    """Return a tuple as Python code, from the code of its elements."""
    inner = ", ".join(elements)
    return f"({inner},)" if len(elements) == 1 else f"({inner})"
