"""Hyperparameters as numbers that record how a chain uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchzero_clip.source.symbols import Op, Value, Write, binary
from torchzero_clip.source.written_numbers import written

OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
"""For each comparison, its opposite: the comparison that holds if the first one does not."""


class LiveNumbers:
    """Creates written numbers, and records the decisions that the chain made by comparing them."""

    def __init__(self) -> None:
        self.forbidden: list[tuple[str, Write]] = []
        """Keys of hyperparameters, each with a condition that would make the chain run other code.

        The file contains only the code for the present values, so it raises an error if such a
        condition holds.
        """
        self.shared: list[str] = []
        """Keys of hyperparameters that must be equal in all groups."""

    def value(self, key: str, value: Any) -> Any:
        """Return a hyperparameter as a written number, or as a tuple of written numbers."""
        if isinstance(value, (tuple, list)):
            return tuple([self._number(key, i, x) for i, x in enumerate(value)])
        return self._number(key, None, value)

    def _number(self, key: str, index: int | None, value: Any) -> Any:
        """Return a hyperparameter or its element. A number is returned as a written number."""
        if not isinstance(value, (int, float)):
            return value
        leaf = Value("number", live=(key, index))
        return self.number(value, leaf, lambda names: names(leaf))

    def number(self, number: Any, value: Value, write: Write, args: tuple[Value, ...] = ()) -> Any:
        """Return a number together with the expression that computes it from values."""
        value.op = Op(write, list(args), value)
        return written(number, value, self._compared)

    def _compared(self, symbol: str, value: Value, other: Any, holds: bool) -> None:
        """Record the comparison of a hyperparameter, because the text of the file depends on it."""
        keys = [leaf.live[0] for leaf in leaves(value) if leaf.live]
        if keys:
            wrong = OPPOSITE[symbol] if holds else symbol
            self.forbidden.append((keys[0], lambda names: binary(wrong, value, other, names)))


def leaves(value: Value) -> Iterator[Value]:
    """Yield the hyperparameters in an expression of numbers."""
    if value.live is not None:
        yield value
    elif value.op is not None:
        for x in value.op.args:
            yield from leaves(x)
