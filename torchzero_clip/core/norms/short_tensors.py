"""Rows: short tensors on CPU side by side in scratch memory, which torch reduces in one call.

A copy in float64, filled up with zeros to whole rows, takes less than a call for each tensor.
Nothing but a tensor itself decides what is computed for it, so that its norm has the same bits
whatever is measured beside it.
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
ROOM = 2**18  # numbers that scratch memory holds
SHORT = 2**12  # entries of a tensor that is copied


class Reduction(NamedTuple):
    """What a row becomes, one number, and how those of a tensor are joined."""

    of_rows: Callable[[Tensor], Tensor]  # it may write to them
    how: Literal["sum", "max"] = "sum"
    squares: bool = False  # whether the root of a sum of squares is taken

    def joined(self, numbers: Tensor, lengths: Tensor) -> Tensor:
        """Each of some lengths of numbers as one, in float64."""
        values = numbers.double()
        if self.squares:
            values = values * values
        joined = torch.segment_reduce(values, self.how, lengths=lengths, unsafe=True)
        return joined.sqrt_() if self.squares else joined


POWERS: dict[float, Reduction] = {  # torch's own 1-norm takes four times the sum
    1: Reduction(lambda rows: rows.abs_().sum(dim=1)),
    2: Reduction(partial(torch.linalg.vector_norm, ord=2, dim=1), squares=True),
}
LINF = Reduction(lambda rows: rows.abs_().amax(dim=1), "max")
SUM = Reduction(lambda rows: rows.sum(dim=1))


def reduced(
    tensors: Sequence[Tensor], to: Reduction, long: Callable[[list[Tensor]], Tensor]
) -> Tensor:
    """A number for each tensor, in float64; `long` makes those of tensors that are not copied."""
    packing = PACKINGS.of(tuple(map(SHAPE, tensors)))
    numbers = [
        to.joined(to.of_rows(batch.copy(tensors)), batch.lengths) for batch in packing.batches
    ]
    if packing.long:
        numbers.append(long([tensors[i] for i in packing.long]))
    joined = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
    return joined if packing.order is None else joined[packing.order]


class Batch:
    """Short tensors that are copied together: their places in a list, and in scratch memory."""

    def __init__(self, indexes: list[int], shapes: Sequence[torch.Size], memory: Tensor) -> None:
        counts = [rows_of(shapes[i]) for i in indexes]
        self.indexes, self.rows = indexes, memory[: sum(counts) * ROW].view(-1, ROW)
        parts = zip(indexes, self.rows.split(counts), strict=True)
        self.places = [part.view(-1)[: shapes[i].numel()].view(shapes[i]) for i, part in parts]
        self.full = sum(map(Tensor.numel, self.places)) == self.rows.numel()
        self.lengths = torch.tensor(counts, device="cpu")

    def copy(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rows of these tensors."""
        if not self.full:
            self.rows.zero_()
        foreach("copy_", self.places, [tensors[i] for i in self.indexes])
        return self.rows


class Packing:
    """The batches of the short ones among tensors of some shapes, and the places of the others."""

    def __init__(self, shapes: Sequence[torch.Size], memory: Tensor) -> None:
        sizes = [shape.numel() for shape in shapes]
        short = [i for i, n in enumerate(sizes) if n <= SHORT]
        self.long = [i for i, n in enumerate(sizes) if n > SHORT]
        ends = itertools.accumulate([rows_of(shapes[i]) * ROW for i in short])
        groups = batches([end // (ROOM - SHORT) for end in ends])
        self.batches = [Batch([short[k] for k in some], shapes, memory) for some in groups]
        order = torch.tensor(short + self.long, device="cpu").argsort()
        self.order = None if bool((order.diff() == 1).all()) else order


def rows_of(shape: torch.Size) -> int:
    """The number of rows that hold a tensor."""
    return -(-shape.numel() // ROW)


class Packings(threading.local):
    """The scratch memory of a thread, and the packings of tensors in it."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # memory that is written outside of it as well
            self.memory = torch.empty(ROOM, dtype=torch.float64, device="cpu")
        self.of = functools.lru_cache(64)(functools.partial(Packing, memory=self.memory))


PACKINGS = Packings()
