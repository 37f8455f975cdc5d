"""Stacks: what is of one form is done in one call, and matrices have their state side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import share_memory
from torchzero_clip.core.torch_private import base

T = TypeVar("T")
MatrixState: TypeAlias = "dict[str, Tensor]"
"""The state of one matrix, or of a stack of them, by name."""
MatrixPlace: TypeAlias = "tuple[int, int]"
"""The place of a matrix: that of its parameter, and its own among the matrices of that."""

MOST = 2**26  # entries of matrices and their state that share memory, taken a few times in a step
MOST_ON_CPU = 2**19  # of which a few copies fit into the cache
COUNT = 128  # parts that tensors are cut into where these are large


def portion(tensors: Sequence[Tensor], least: int) -> int:
    """The entries that go together: `least`, and of many more so many that there are few parts."""
    return max(least, sum(map(Tensor.numel, tensors)) // COUNT)


def batches(
    kinds: Sequence[Any],
    sizes: Sequence[int] | None = None,
    most: float = math.inf,
    joins: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """The places of what goes together, in the order in which batches begin.

    Args:
        kinds: What all of a batch have in common. A batch of another kind closes none.
        sizes: The entries of each, of which a batch has no more than `most`; one may have more.
        joins: Whether one may come behind another in a batch, by their places.
    """
    made: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # of each kind, and its entries
    for i, (kind, size) in enumerate(zip(kinds, sizes or [0] * len(kinds), strict=True)):
        some, total = last.get(kind, ([], 0))
        if not some or total + size > most or not (joins is None or joins(some[-1], i)):
            some, total = [], 0
            made.append(some)
        some.append(i)
        last[kind] = some, total + size
    return made


def in_order(batches: Iterable[list[int]], make: Callable[[list[int]], Iterable[T]]) -> list[T]:
    """What is made of each place, by a call for each batch of them, in the order of the places."""
    made = {i: x for some in batches for i, x in zip(some, make(some), strict=True)}
    return [made[i] for i in range(len(made))]


class Stack(NamedTuple):
    """Matrices that a rule takes in one call.

    Attributes:
        places: The place of each.
        state: Their state, by name: of a rule that takes stacks with a first dim, an entry of it
            for each matrix; otherwise that of the one matrix.
        begins: Whether this is the first step of their parameters here.
        stacked: Whether the rule takes stacks.
    """

    places: list[MatrixPlace]
    state: MatrixState
    begins: bool
    stacked: bool

    def part(self, some: slice) -> Stack:
        """Some of the matrices, which follow each other."""
        if len(self.places[some]) == len(self.places):
            return self
        state = {name: t[some] for name, t in self.state.items()}
        return self._replace(places=self.places[some], state=state)

    def parts(self, chosen: Callable[[int], bool]) -> Iterator[slice]:
        """Where parameters are chosen, as slices of the matrices."""
        begin = 0
        for is_chosen, run in groupby(self.places, lambda place: chosen(place[0])):
            end = begin + len(list(run))
            if is_chosen:
                yield slice(begin, end)
            begin = end

    def cut(self, tensors: dict[int, Tensor], rows: Sequence[list[int]]) -> Tensor:
        """The matrices of tensors like the parameters, as the rule takes them."""
        parts = []
        for i, first, count in self._runs():
            high, begin = rows[i][first], sum(rows[i][:first])
            whole = tensors[i].reshape(sum(rows[i]), -1)
            parts.append(whole[begin : begin + count * high].view(count, high, -1))
        stack = parts[0] if len(parts) == 1 else torch.cat(parts)
        return stack if self.stacked else stack[0]

    def give(self, made: Tensor, blocks: dict[int, dict[int, Tensor]]) -> None:
        """Put rows that were made of the matrices under their parameters and first matrices."""
        runs = list(self._runs())
        if not made.is_cpu:  # once, for what takes many tensors as they lie
            made = made.contiguous()
        each = made.split([count for *_, count in runs]) if self.stacked else [made]
        for (i, first, _), part in zip(runs, each, strict=True):
            blocks.setdefault(i, {})[first] = part.reshape(-1, part.shape[-1])

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Each parameter, the first of its matrices that are here, and how many follow it."""
        for i, run in groupby(self.places, lambda place: place[0]):
            some = list(run)
            yield i, some[0][1], len(some)


def joined(blocks: dict[int, Tensor], like: Tensor) -> Tensor:
    """Blocks of rows as one tensor in the shape of another."""
    rows = [blocks[first] for first in sorted(blocks)]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).reshape(like.shape)


def share(rows: Sequence[MatrixState]) -> list[MatrixState]:
    """The state of matrices of one form, in the same memory."""
    columns = [share_memory([_itself(row[name]) for row in rows]) for name in rows[0]]
    return [dict(zip(rows[0], each, strict=True)) for each in zip(*columns, strict=True)]


def stands_alone(state: MatrixState) -> bool:
    """Whether no tensor of a matrix's state shares memory."""
    return all([base(_itself(t)) is None for t in state.values()])


def _itself(t: Tensor) -> Tensor:
    """The tensor that this one is another handle of, as what an owner gives out is a view."""
    whole = base(t)
    return whole if whole is not None and _form(whole) == _form(t) else t


def _form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def follows(state: MatrixState, before: MatrixState) -> bool:
    """Whether the state of a matrix lies behind that of another one, which it shares memory with.

    Without any it does.
    """
    return all([_is_behind(t, before[name]) for name, t in state.items()])


def _is_behind(t: Tensor, before: Tensor) -> bool:
    whole = base(t)
    if whole is None or base(before) is not whole or whole.shape[1:] != t.shape or not t.numel():
        return False
    aligned = whole.is_contiguous() and t.is_contiguous() and t.storage_offset() % t.numel() == 0
    return aligned and t.storage_offset() - before.storage_offset() == t.numel()


def side_by_side(rows: Sequence[MatrixState]) -> MatrixState:
    """The state of matrices that lie side by side, with a first dim, in the same memory."""
    return {name: _side_by_side(t, len(rows)) for name, t in rows[0].items()}


def _side_by_side(first: Tensor, count: int) -> Tensor:
    whole = base(first)
    if count == 1 or whole is None:
        return first.unsqueeze(0)
    begin = (first.storage_offset() - whole.storage_offset()) // first.numel()
    return whole[begin : begin + count]


def finite(tensors: Sequence[Tensor], stacked: bool) -> Tensor:
    """Whether all entries of a matrix's tensors are finite: a flag, or one for each of a stack."""
    kinds = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    flags = [_finite(t, stacked) for t in kinds or tensors]
    return flags[0] if len(flags) == 1 else torch.stack(flags).all(0)


def _finite(t: Tensor, stacked: bool) -> Tensor:
    if t.is_cpu and t.is_floating_point() and t.numel() and (not stacked or len(t) == 1):
        flag = torch.stack(torch.aminmax(t)).isfinite().all()  # isfinite takes 30 times as long
        return flag.unsqueeze(0) if stacked else flag
    flags = t.isfinite()
    return flags.flatten(1).all(1) if stacked else flags.all()
