"""Written numbers: Python numbers that record the expression that computed them.

Hyperparameters and the sizes of tensors are written numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchzero_clip.source.symbols import (
    COMPARISONS,
    UNARY,
    Names,
    Op,
    SourceError,
    Value,
    Write,
    binary,
    operand,
    precedence_of,
)

Notice = Callable[[str, Any, Any, bool], None]
"""A function that receives a comparison: the symbol, both sides, and whether it is true."""


class WrittenNumber:
    """The base class of written floats and written ints, which are numbers with an expression.

    Attributes:
        value: The expression.
        notice: A function that receives each comparison of the number, because the text of the file
            depends on the result.
    """

    value: Value
    notice: Notice

    def __bool__(self) -> bool:
        return bool(self != 0)  # type: ignore[comparison-overlap]

    def __hash__(self) -> int:
        return hash(plain(self))


class WrittenFloat(WrittenNumber, float):
    """A hyperparameter that is a float, or a float computed from written numbers."""


class WrittenInt(WrittenNumber, int):
    """A hyperparameter that is an int, the size of a tensor, or an int computed from these."""


HOST = [f"__{name}__" for name in ("float", "int", "index", "round", "floor", "ceil", "trunc")]
HOST += [f"__{name}__" for name in ("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod")]
HOST += ["__abs__", "__pos__", "is_integer"]
"""Methods whose result has no expression, so that a rule may not call them."""


def _refuse(self: WrittenNumber, *_: Any) -> Any:
    """Raise the error for a rule that reads the plain number."""
    raise SourceError("the transform converts a hyperparameter to a Python number")


def plain(x: Any) -> Any:
    """Return a number without its expression."""
    if isinstance(x, WrittenFloat):
        return float.__float__(x)
    return int.__int__(x) if isinstance(x, WrittenInt) else x


def written(number: Any, value: Value, notice: Notice) -> Any:
    """Return a written number: the number together with its expression."""
    kind = WrittenInt if isinstance(number, int) else WrittenFloat
    with_expression: Any = kind(number)
    with_expression.value = value
    with_expression.notice = notice
    return with_expression


def expression(args: list[Any], write: Write) -> Value:
    """Return the value that represents an expression of numbers."""
    values = [x.value for x in args if isinstance(x, WrittenNumber)]
    sizes = any(value.kind == "sizes" for value in values)
    joint = all(value.joint for value in values)
    value = Value("sizes" if sizes else "number", joint)
    value.op = Op(write, values, value)
    return value


def _operand(x: Any) -> Any:
    """Return the expression of a written number. Other numbers are returned unchanged."""
    return x.value if isinstance(x, WrittenNumber) else x


def _arithmetic(symbol: str, reflected: bool) -> Any:
    """Return the method for an arithmetic operator. `reflected` means a method like `__radd__`."""
    function = getattr(operator, symbol)

    def method(self: WrittenNumber, other: Any) -> Any:
        if isinstance(other, Tensor) or not isinstance(other, (int, float)):
            return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        if symbol == "add" and not isinstance(a, WrittenNumber) and a == 0:
            return self  # `sum` starts with 0
        if symbol == "mul" and not isinstance(b, WrittenNumber) and b == 1:
            return self
        left = _operand(a)
        right = _operand(b)
        value = expression([a, b], lambda names: binary(symbol, left, right, names))
        return written(function(plain(a), plain(b)), value, self.notice)

    return method


def _comparison(symbol: str) -> Any:
    """Return the method for a comparison operator. The method reports the result to `notice`."""
    function = getattr(operator, symbol)

    def method(self: WrittenNumber, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if self.value.kind == "sizes":
            raise SourceError("the transform branches on the number of elements of a parameter")
        holds = function(plain(self), plain(other))
        self.notice(symbol, self.value, _operand(other), holds)
        return holds

    return method


def _negative(self: WrittenNumber) -> Any:
    """Return the number with the opposite sign."""
    inner = self.value

    def write(names: Names) -> str:
        text = operand(inner, names)
        return f"-{text}" if precedence_of(text) >= UNARY else f"-({text})"

    return written(-plain(self), expression([self], write), self.notice)


for kind in (WrittenFloat, WrittenInt):
    for symbol in ("add", "sub", "mul", "truediv", "pow"):
        setattr(kind, f"__{symbol}__", _arithmetic(symbol, reflected=False))
        setattr(kind, f"__r{symbol}__", _arithmetic(symbol, reflected=True))
    for symbol in COMPARISONS:
        setattr(kind, f"__{symbol}__", _comparison(symbol))
    for name in HOST:
        setattr(kind, name, _refuse)
    kind.__neg__ = _negative  # type: ignore[method-assign, assignment]
    kind.__hash__ = WrittenNumber.__hash__  # type: ignore[method-assign]
