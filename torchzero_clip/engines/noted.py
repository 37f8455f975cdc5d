"""Noted: numbers that a tape knows, so that what is computed from them is computed again."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Notes(Protocol):
    """All that a noted number knows of its tape."""

    def compute(self, text: str, operands: Sequence[Any], value: float) -> float:
        """The value of an expression, in which {0} and {1} stand for the operands."""
        ...

    def halves(
        self, factor: float, dtype: torch.dtype, in_place: bool = False
    ) -> Iterator[tuple[str, float]]:
        """`norms.halves` of a number as a factor and a divisor."""
        ...

    def expect(self, text: str, operands: Sequence[Any]) -> None:
        """Note a condition that must hold where the step is repeated."""
        ...


class Noted(float):
    """A number that a tape knows by a name; it notes arithmetic with it, and comparisons."""

    name: str
    tape: Notes

    def __new__(cls, value: float, name: str, tape: Notes) -> Noted:
        made = super().__new__(cls, value)
        made.name, made.tape = name, tape
        return made

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return self != 0.0


def _arithmetic(text: str, function: Callable[..., float]) -> Callable[..., Any]:
    def compute(self: Noted, *others: Any) -> Any:
        if not all([isinstance(x, (int, float)) for x in others]):
            return NotImplemented
        return self.tape.compute(text, (self, *others), function(*map(float, (self, *others))))

    return compute


def _comparison(text: str, function: Callable[..., bool]) -> Callable[..., Any]:
    def compare(self: Noted, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        truth = function(float(self), float(other))
        self.tape.expect(text if truth else f"not {text}", (self, other))
        return truth

    return compare


def _turned(function: Callable[..., float]) -> Callable[..., float]:
    return lambda x, y: function(y, x)


for name, text in {"neg": "(-{0})", "abs": "abs({0})"}.items():
    setattr(Noted, f"__{name}__", _arithmetic(text, getattr(operator, name)))
for name, sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}.items():
    function = getattr(operator, name)
    setattr(Noted, f"__{name}__", _arithmetic(f"({{0}} {sign} {{1}})", function))
    setattr(Noted, f"__r{name}__", _arithmetic(f"({{1}} {sign} {{0}})", _turned(function)))
for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    setattr(Noted, f"__{name}__", _comparison(f"({{0}} {sign} {{1}})", getattr(operator, name)))


def inverse(x: float) -> float:
    """1 / x, infinite for 0."""
    if isinstance(x, Noted):
        return x.tape.compute("inverse({0})", (x,), inverse(float(x)))
    return 1 / x if x else math.copysign(math.inf, x)
