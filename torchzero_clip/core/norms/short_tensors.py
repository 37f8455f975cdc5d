"""Reductions of short tensors on CPU: the tensors are copied into rows of scratch memory.

torch then reduces all rows in one call. The copies are in float64. Zeros fill up the last row of
each tensor. Copying takes less time than one call per tensor. The computation for a tensor does not
depend on other tensors. So its norm is bitwise identical, whatever other tensors are measured at
the same time.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.stacks import batches
from torchzero_clip.core.tensor_kinds import SHAPE
from torchzero_clip.core.torch_private import foreach

ROW = 256
"""The number of elements of a row."""
SCRATCH_SIZE = 2**18
"""The number of elements of the scratch memory."""
SHORT = 2**12
"""The largest number of elements of a tensor that is copied."""
PACKINGS_KEPT = 64
"""The largest number of packings that a thread keeps."""


class Reduction(NamedTuple):
    """A reduction of a tensor to one number.

    The reduction first computes a number for each row, and then joins these numbers into one.

    Attributes:
        of_rows: A function that returns a number for each row. It may overwrite the rows.
        how: How the numbers of a tensor's rows are joined.
        squares: Whether the numbers are joined as the root of the sum of their squares.
    """

    of_rows: Callable[[Tensor], Tensor]
    how: Literal["sum", "max"] = "sum"
    squares: bool = False

    def joined(self, numbers: Tensor, lengths: Tensor) -> Tensor:
        """Combine the results of the rows of each tensor into one number, in float64.

        Args:
            numbers: The results of `of_rows` for the rows of all tensors.
            lengths: The number of rows of each tensor.
        """
        values = numbers.double()
        if self.squares:
            values = values * values
        joined = torch.segment_reduce(values, self.how, lengths=lengths, unsafe=True)
        return joined.sqrt_() if self.squares else joined


POWERS: dict[float, Reduction] = {
    1: Reduction(lambda rows: rows.abs_().sum(dim=1)),  # vector_norm takes four times as long
    2: Reduction(partial(torch.linalg.vector_norm, ord=2, dim=1), squares=True),
}
"""The reductions to p-norms, by p."""
LINF = Reduction(lambda rows: rows.abs_().amax(dim=1), "max")
SUM = Reduction(lambda rows: rows.sum(dim=1))


def reduced(
    tensors: Sequence[Tensor], to: Reduction, long: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """Reduce each tensor to one number, in float64.

    Args:
        tensors: The tensors.
        to: The reduction.
        long: Reduces the tensors that are too long to be copied.
    """
    packing = PACKINGS.of(tuple(map(SHAPE, tensors)))
    numbers = [
        to.joined(to.of_rows(batch.copy(tensors)), batch.lengths) for batch in packing.batches
    ]
    if packing.long:
        numbers.append(long([tensors[i] for i in packing.long]))
    joined = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
    return joined if packing.order is None else joined[packing.order]


class Batch:
    """Short tensors that are copied into scratch memory together.

    Args:
        indexes: The indices of the tensors in their list.
        shapes: The shapes of all tensors of this list.
        memory: The scratch memory.
    """

    def __init__(self, indexes: list[int], shapes: Sequence[torch.Size], memory: Tensor) -> None:
        counts = [rows_of(shapes[i]) for i in indexes]
        self.indexes = indexes
        self.rows = memory[: sum(counts) * ROW].view(-1, ROW)
        parts = zip(indexes, self.rows.split(counts), strict=True)
        self.places = [part.view(-1)[: shapes[i].numel()].view(shapes[i]) for i, part in parts]
        self.full = sum(map(Tensor.numel, self.places)) == self.rows.numel()
        self.lengths = torch.tensor(counts, device="cpu")

    def copy(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors of this batch into their rows, and return the rows."""
        if not self.full:
            self.rows.zero_()
        foreach("copy_", self.places, [tensors[i] for i in self.indexes])
        return self.rows


class Packing:
    """The batches for the short tensors of a list, and the indices of its long tensors.

    Args:
        shapes: The shapes of the tensors.
        memory: The scratch memory.
    """

    def __init__(self, shapes: Sequence[torch.Size], memory: Tensor) -> None:
        sizes = [shape.numel() for shape in shapes]
        short = [i for i, n in enumerate(sizes) if n <= SHORT]
        self.long = [i for i, n in enumerate(sizes) if n > SHORT]
        ends = itertools.accumulate([rows_of(shapes[i]) * ROW for i in short])
        groups = batches([end // (SCRATCH_SIZE - SHORT) for end in ends])
        self.batches = [Batch([short[k] for k in group], shapes, memory) for group in groups]
        order = torch.tensor(short + self.long, device="cpu").argsort()
        self.order = None if bool((order.diff() == 1).all()) else order


def rows_of(shape: torch.Size) -> int:
    """Return the number of rows for a tensor of this shape."""
    return -(-shape.numel() // ROW)


class Packings(threading.local):
    """The scratch memory of a thread, and the packings for this memory, by tensor shapes."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            self.memory = torch.empty(SCRATCH_SIZE, dtype=torch.float64, device="cpu")
        self.of = functools.lru_cache(PACKINGS_KEPT)(functools.partial(Packing, memory=self.memory))


PACKINGS = Packings()
