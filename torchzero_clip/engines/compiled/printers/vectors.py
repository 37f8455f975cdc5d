"""Vectors: the parts of vector programs, which do arithmetic on a few numbers between two launches.

A vector program is a list of nodes. A node reads and writes regions. A region is a part of a memory
block, with a shape and strides. `replay/lowering.py` makes the nodes from the graph of a recorded
step, and the printers print the nodes. So a printer does not need PyTorch's graph. A view is
another region of the same memory block and needs no operator. A single number is a region without
dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.engines.compiled.printers.program import Relaunch


class Region(NamedTuple):
    """A part of a memory block, with a shape and strides, like a view of a tensor.

    The field `memory` is the index of the block. The region begins at the element `start`.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    def of(self, dims: Sequence[int]) -> Region:
        """Return the region with only these dims, in this order."""
        shape = tuple([self.shape[d] for d in dims])
        return self._replace(shape=shape, strides=tuple([self.strides[d] for d in dims]))

    def expanded(self, shape: Sequence[int]) -> Region:
        """Return the region broadcast to a shape. As in torch, the last dims are aligned."""
        missing = len(shape) - len(self.shape)
        if any([n not in (1, wide) for n, wide in zip(self.shape, shape[missing:], strict=True)]):
            raise ValueError(f"the shape {self.shape} cannot be broadcast to {tuple(shape)}")
        dims = zip(self.shape, self.strides, strict=True)
        strides = [step if n > 1 else 0 for n, step in dims]
        return self._replace(shape=tuple(shape), strides=(*[0] * missing, *strides))


DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
"""The dtypes of a region's elements."""
Number: TypeAlias = "int | float | bool"
VectorOperand: TypeAlias = "Region | Number"


@dataclass
class VectorMemory:
    """A block of memory that contains regions.

    Attributes:
        tensor: A tensor in this block that exists before the step. The first element of the tensor
            is the element `start` of the block.
        changes: Whether each step uses another tensor in place of this block.
        rows: If this block joins several other blocks: the index and the first element of each of
            them. The first dim of a region goes from row to row.
        size: The number of elements, if the block belongs to the vector program.
    """

    dtype: torch.dtype
    tensor: Tensor | None = None
    changes: bool = False
    rows: tuple[tuple[int, int], ...] = ()
    start: int = 0
    size: int = 0

    @property
    def own(self) -> bool:
        """Whether the block belongs to the vector program."""
        return self.tensor is None and not (self.changes or self.rows)


class VectorNode(NamedTuple):
    """An operator on each element of a region, or a reduction over the last dims of a region."""

    name: str
    out: Region
    given: tuple[VectorOperand, ...]
    dtype: torch.dtype  # of the computation
    power: float = 0.0  # of a norm


class Launched(NamedTuple):
    """A launch of a list program between vector nodes. The region `out` receives the statistics."""

    launch: Relaunch
    numbers: tuple[VectorOperand, ...]
    vectors: tuple[Region, ...]
    scalars: tuple[Region, ...]
    out: Region | None

    @property
    def given(self) -> tuple[VectorOperand, ...]:
        """All operands of the launch except its buffers."""
        return *self.numbers, *self.vectors, *self.scalars


Segment: TypeAlias = "list[VectorNode | Launched]"
"""Consecutive vector nodes and launches, without a call of PyTorch between them."""


def regions_of(nodes: Iterable[VectorNode | Launched]) -> list[Region]:
    """Return all regions that nodes write and read."""
    return [x for node in nodes for x in (node.out, *node.given) if isinstance(x, Region)]


def touched(operands: Sequence[Any], memories: Sequence[VectorMemory]) -> set[int]:
    """Return the indices of the memory blocks of all regions among some operands."""
    regions = [x for x in operands if type(x) is Region]
    places = [memories[x.memory].rows or [(x.memory, 0)] for x in regions]
    return {memory for rows in places for memory, _ in rows}
