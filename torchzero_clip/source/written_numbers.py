"""Numbers that remember how they were computed: live values, and the sizes of tensors."""

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
    binary,
    operand,
)

Notice = Callable[[str, Any, Any, bool], None]


class WrittenNumber:
    """What a written float and a written int share: the expression that they are.

    Attributes:
        value: The expression.
        notice: Called where a rule compares it: the comparison is part of the file then.
    """

    value: Value
    notice: Notice

    def __bool__(self) -> bool:
        return bool(self != 0)  # type: ignore[comparison-overlap]

    def __hash__(self) -> int:
        return hash(plain(self))


class WrittenFloat(WrittenNumber, float):
    """A live value."""


class WrittenInt(WrittenNumber, int):
    """A live value, or the size of a tensor."""


HOST = [f"__{name}__" for name in ("float", "int", "index", "round", "floor", "ceil", "trunc")]
HOST += [f"__{name}__" for name in ("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod")]
HOST += ["__abs__", "__pos__", "is_integer"]


def _waits(self: WrittenNumber, *_: Any) -> Any:
    raise SourceError("it reads a live value as a number on the host")


def plain(x: Any) -> Any:
    """A number without its expression."""
    if isinstance(x, WrittenFloat):
        return float.__float__(x)
    return int.__int__(x) if isinstance(x, WrittenInt) else x


def written(number: Any, value: Value, notice: Notice) -> Any:
    """A number with the expression that it is."""
    made: Any = (WrittenInt if isinstance(number, int) else WrittenFloat)(number)
    made.value, made.notice = value, notice
    return made


def expression(args: list[Any], write: Callable[[Names], tuple[str, int]]) -> Value:
    """A value that is an expression of numbers."""
    found = [x.value for x in args if isinstance(x, WrittenNumber)]
    kind = "sizes" if any(value.kind == "sizes" for value in found) else "number"
    joint = all(value.joint for value in found)
    value = Value("sizes" if kind == "sizes" else "number", joint)
    value.made = Op(write, found, value)
    return value


def _operands(a: Any, b: Any) -> tuple[Any, Any]:
    return tuple(x.value if isinstance(x, WrittenNumber) else x for x in (a, b))  # type: ignore[return-value]


def _arithmetic(symbol: str, reflected: bool) -> Any:
    function = getattr(operator, symbol)

    def method(self: WrittenNumber, other: Any) -> Any:
        if isinstance(other, Tensor) or not isinstance(other, (int, float)):
            return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        if symbol == "add" and not isinstance(a, WrittenNumber) and a == 0:
            return self  # the start of a sum
        if symbol == "mul" and not isinstance(b, WrittenNumber) and b == 1:
            return self
        left, right = _operands(a, b)
        value = expression([a, b], lambda names: binary(symbol, left, right, names))
        return written(function(plain(a), plain(b)), value, self.notice)

    return method


def _comparison(symbol: str) -> Any:
    function = getattr(operator, symbol)

    def method(self: WrittenNumber, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if self.value.kind == "sizes":
            raise SourceError("it decides by the size of a parameter")
        holds = function(plain(self), plain(other))
        self.notice(symbol, self.value, _operands(other, 0)[0], holds)
        return holds

    return method


def _negative(self: WrittenNumber) -> Any:
    inner = self.value
    value = expression([self], lambda names: _minus(operand(inner, names)))
    return written(-plain(self), value, self.notice)


def _minus(x: tuple[str, int]) -> tuple[str, int]:
    return (f"-{x[0]}" if x[1] >= UNARY else f"-({x[0]})"), UNARY


for kind in (WrittenFloat, WrittenInt):
    for symbol in ("add", "sub", "mul", "truediv", "pow"):
        setattr(kind, f"__{symbol}__", _arithmetic(symbol, reflected=False))
        setattr(kind, f"__r{symbol}__", _arithmetic(symbol, reflected=True))
    for symbol in COMPARISONS:
        setattr(kind, f"__{symbol}__", _comparison(symbol))
    for name in HOST:
        setattr(kind, name, _waits)
    kind.__neg__ = _negative  # type: ignore[method-assign, assignment]
    kind.__hash__ = WrittenNumber.__hash__  # type: ignore[method-assign]
