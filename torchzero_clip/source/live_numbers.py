"""LiveNumbers: live values, as numbers that remember what was done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from torchzero_clip.source.symbols import ATOM, Names, Op, Value, binary
from torchzero_clip.source.written_numbers import written

OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


class LiveNumbers:
    """Makes written numbers, and notes what the chain decided by one."""

    def __init__(self) -> None:
        self.broken: list[tuple[str, Callable[[Names], tuple[str, int]]]] = []
        """A key, and what may not be of its value, since the file has one way alone."""
        self.shared: list[str] = []  # keys whose value groups must agree on

    def value(self, key: str, value: Any) -> Any:
        """A live value, or a tuple of them, as numbers."""
        if isinstance(value, (tuple, list)):
            return tuple([self._number(key, i, x) for i, x in enumerate(value)])
        return self._number(key, None, value)

    def _number(self, key: str, index: int | None, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.item()
        if not isinstance(value, (int, float)):
            return value
        leaf = Value("number", live=(key, index))
        return self.number(value, leaf, lambda names: (names(leaf), ATOM))

    def number(self, number: Any, value: Value, write: Any, args: tuple[Value, ...] = ()) -> Any:
        """A number that is an expression of values."""
        value.made = Op(write, list(args), value)
        return written(number, value, self._compared)

    def _compared(self, symbol: str, value: Value, other: Any, holds: bool) -> None:
        """A comparison of a live value decides what the file does."""
        keys = [leaf.live[0] for leaf in leaves(value) if leaf.live]
        if keys:
            wrong = OPPOSITE[symbol] if holds else symbol
            self.broken.append((keys[0], lambda names: binary(wrong, value, other, names)))


def leaves(value: Value) -> Iterator[Value]:
    """The live values in an expression of numbers."""
    if value.live is not None:
        yield value
    elif value.made is not None:
        for x in value.made.args:
            yield from leaves(x)
