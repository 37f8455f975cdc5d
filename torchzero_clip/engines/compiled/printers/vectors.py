"""Vectors: what a program does with a few numbers, as nodes over regions of memory.

A view is a region and needs no operator, and one number is a region without dims. What prints the
nodes knows nothing of torch's graph: loops.py and printer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.engines.compiled.printers.program import Relaunch


class Region(NamedTuple):
    """Where the entries of a tensor lie: those of a memory, from `start` on."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, dims: Sequence[int]) -> Region:
        """The same with these dims alone, in this order."""
        rows = [tuple([row[d] for d in dims]) for row in (self.shape, self.strides)]
        return self._replace(shape=rows[0], strides=rows[1])

    def expanded(self, shape: Sequence[int]) -> Region:
        """The same entries, repeated for a larger shape as torch does: it aligns the last dims."""
        missing = len(shape) - len(self.shape)
        if any([n not in (1, wide) for n, wide in zip(self.shape, shape[missing:], strict=True)]):
            raise ValueError(f"{self.shape} does not broadcast to {tuple(shape)}")
        strides = [step * (n > 1) for n, step in zip(self.shape, self.strides, strict=True)]
        return self._replace(shape=tuple(shape), strides=(*[0] * missing, *strides))


DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
"""The dtypes of entries."""
Number: TypeAlias = "int | float | bool"
VectorOperand: TypeAlias = "Region | Number"


@dataclass
class VectorMemory:
    """The memory of regions.

    Attributes:
        tensor: What was there before the step; it lies `start` entries behind where regions begin.
        changes: Whether it is another one in every step.
        rows: The regions that lie side by side in it: the first dim goes from one to the next.
        size: The number of entries of memory that belongs to the program.
    """

    dtype: torch.dtype
    tensor: Tensor | None = None
    changes: bool = False
    rows: tuple[tuple[int, int], ...] = ()
    start: int = 0
    size: int = 0

    @property
    def own(self) -> bool:
        """Whether it belongs to the program."""
        return self.tensor is None and not (self.changes or self.rows)


class VectorNode(NamedTuple):
    """An operator at every entry of a region, or a reduction of the last dims of what it takes."""

    name: str
    out: Region
    given: tuple[VectorOperand, ...]
    dtype: torch.dtype  # that it is computed in
    power: float = 0.0  # of a norm


class Launched(NamedTuple):
    """A launch of a list program, and the region of what it measures."""

    launch: Relaunch
    numbers: tuple[VectorOperand, ...]
    vectors: tuple[Region, ...]
    scalars: tuple[Region, ...]
    out: Region | None

    @property
    def given(self) -> tuple[VectorOperand, ...]:
        """All that it reads besides lists."""
        return *self.numbers, *self.vectors, *self.scalars


Segment: TypeAlias = "list[VectorNode | Launched]"
"""Nodes in a row, with no call of torch between them."""


def regions_of(nodes: Iterable[VectorNode | Launched]) -> list[Region]:
    """All regions that nodes write and read, besides lists."""
    return [x for node in nodes for x in (node.out, *node.given) if isinstance(x, Region)]


def touched(operands: Sequence[Any], memories: Sequence[VectorMemory]) -> set[int]:
    """The memories that operands lie in."""
    found = [memories[x.memory].rows or [(x.memory, 0)] for x in operands if type(x) is Region]
    return {memory for rows in found for memory, _ in rows}
