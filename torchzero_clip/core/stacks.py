"""Batches: items of one kind, such as matrices of one shape, are processed in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core.logical_matrices import LogicalMatrices
from torchzero_clip.core.tensor_kinds import is_inexact, share_memory
from torchzero_clip.core.torch_private import base

T = TypeVar("T")
MatrixState: TypeAlias = "dict[str, Tensor]"
"""The state of one matrix, or of a stack of matrices, by name."""
MatrixPlace: TypeAlias = "tuple[int, int]"
"""The index of a parameter in its bucket, and the index of a matrix in this parameter."""
Run: TypeAlias = "tuple[int, int, int, int]"
"""A parameter, a cut of its matrices, the first matrix in the cut, and a number of matrices."""

MOST = 2**26  # elements of matrices and their state in one stack; a step copies them a few times
MOST_ON_CPU = 2**19  # the same on CPU, where a few copies should fit into the cache
PARTS = 128  # parts in which the elements of large tensors are processed


def portion(tensors: Sequence[Tensor], least: int) -> int:
    """Return the number of elements to process at once: `least`, or more for large tensors."""
    return max(least, sum(map(Tensor.numel, tensors)) // PARTS)


def batches(
    kinds: Sequence[Any],
    sizes: Sequence[int] | None = None,
    most: float = math.inf,
    joins: Callable[[int, int], bool] | None = None,
) -> list[list[int]]:
    """Return the indices of the items of each batch, in the order of the first items.

    Args:
        kinds: The kind of each item. Items of one batch have the same kind.
        sizes: The size of each item.
        most: The largest size of a batch. A single item may be larger.
        joins: A function of the indices of two items. It returns whether one item may follow the
            other item in a batch.
    """
    all_batches: list[list[int]] = []
    open_batches: dict[Any, tuple[list[int], int]] = {}  # by kind, with their sizes
    for i, (kind, size) in enumerate(zip(kinds, sizes or [0] * len(kinds), strict=True)):
        batch, total = open_batches.get(kind, ([], 0))
        if not batch or total + size > most or not (joins is None or joins(batch[-1], i)):
            batch = []
            total = 0
            all_batches.append(batch)
        batch.append(i)
        open_batches[kind] = batch, total + size
    return all_batches


def in_order(batches: Iterable[list[int]], make: Callable[[list[int]], Iterable[T]]) -> list[T]:
    """Call `make` for each batch, and return the results in the order of the items."""
    results = {i: x for batch in batches for i, x in zip(batch, make(batch), strict=True)}
    return [results[i] for i in range(len(results))]


class Stack(NamedTuple):
    """Matrices that a rule processes in one call.

    Attributes:
        places: The place of each matrix.
        state: The state of the matrices, by name. If `stacked`, its tensors have a first dim, with
            an element for each matrix.
        begins: Whether this is the first step of the matrices' parameters.
        stacked: Whether the rule accepts stacks. Otherwise there is one matrix.
    """

    places: list[MatrixPlace]
    state: MatrixState
    begins: bool
    stacked: bool

    def part(self, some: slice) -> Stack:
        """Return the stack of some of the matrices."""
        if len(self.places[some]) == len(self.places):
            return self
        state = {name: t[some] for name, t in self.state.items()}
        return self._replace(places=self.places[some], state=state)

    def parts(self, chosen: Callable[[int], bool]) -> Iterator[slice]:
        """Yield the slices of matrices whose parameters are chosen."""
        begin = 0
        for is_chosen, run in groupby(self.places, lambda place: chosen(place[0])):
            end = begin + len(list(run))
            if is_chosen:
                yield slice(begin, end)
            begin = end

    def cut(self, stacks: Mapping[int, Sequence[Tensor]], runs: Sequence[Run]) -> Tensor:
        """Return the matrices of this stack from other tensors, in the form for the rule.

        Args:
            stacks: For the index of each parameter, the stacks of `LogicalMatrices.of`.
            runs: The result of `runs`.
        """
        parts = []
        for i, cut, first, count in runs:
            part = stacks[i][cut]
            if count < len(part):
                part = part[first : first + count]
            # rules receive contiguous matrices, as they receive them from separate parameters
            parts.append(part.contiguous())
        stack = parts[0] if len(parts) == 1 else torch.cat(parts)
        return stack if self.stacked else stack[0]

    def give(
        self,
        result: Tensor,
        pieces: dict[int, dict[tuple[int, int], Tensor]],
        runs: Sequence[Run],
    ) -> None:
        """Put the parts of a result into `pieces`, by parameter, cut and first matrix."""
        if not result.is_cpu:  # one copy here instead of a copy for each part later
            result = result.contiguous()
        if not self.stacked:
            result = result.unsqueeze(0)
        parts = result.split([count for *_, count in runs]) if len(runs) > 1 else [result]
        for (i, cut, first, _), part in zip(runs, parts, strict=True):
            pieces.setdefault(i, {})[cut, first] = part

    def runs(self, matrices: Sequence[LogicalMatrices | None]) -> list[Run]:
        """Return the matrices of this stack that follow each other in one cut of a parameter.

        Each item has the index of the parameter, the index of the cut, the index of the first
        matrix in the cut, and the number of matrices.
        """
        runs: list[Run] = []
        for i, b in self.places:
            cut, k = known(matrices[i]).places[b]
            if runs and runs[-1][:2] == (i, cut):
                _, _, first, count = runs[-1]
                runs[-1] = (i, cut, first, count + 1)
            else:
                runs.append((i, cut, k, 1))
        return runs


def joined(pieces: Mapping[tuple[int, int], Tensor], matrices: LogicalMatrices | None) -> Tensor:
    """Return pieces, by their cut and first matrix, as one tensor in the shape of the parameter."""
    of_param = known(matrices)
    by_cut: list[list[Tensor]] = [[] for _ in of_param.cuts]
    for cut, first in sorted(pieces):
        by_cut[cut].append(pieces[cut, first])
    whole = of_param.back([row[0] if len(row) == 1 else torch.cat(row) for row in by_cut])
    return whole.contiguous()  # later links compute with tensors as separate parameters have them


def known(matrices: LogicalMatrices | None) -> LogicalMatrices:
    """Return the matrices of a parameter that has matrices."""
    assert matrices is not None
    return matrices


def share(states: Sequence[MatrixState]) -> list[MatrixState]:
    """Return the state of matrices of one shape as parts of one tensor for each name."""
    names = list(states[0])
    columns = [share_memory([_itself(state[name]) for state in states]) for name in names]
    return [dict(zip(names, tensors, strict=True)) for tensors in zip(*columns, strict=True)]


def stands_alone(state: MatrixState) -> bool:
    """Return whether no tensor of a matrix's state shares memory."""
    return all([base(_itself(t)) is None for t in state.values()])


def _itself(t: Tensor) -> Tensor:
    """Return the tensor that a view covers completely, such as the local part of a DTensor."""
    whole = base(t)
    return whole if whole is not None and _form(whole) == _form(t) else t


def _form(t: Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def follows(state: MatrixState, before: MatrixState) -> bool:
    """Return whether the state of a matrix directly follows another matrix's state in memory.

    For empty state, the result is True.
    """
    return all([_is_next(t, before[name]) for name, t in state.items()])


def _is_next(t: Tensor, before: Tensor) -> bool:
    whole = base(t)
    if whole is None or base(before) is not whole or whole.shape[1:] != t.shape or not t.numel():
        return False
    aligned = whole.is_contiguous() and t.is_contiguous() and t.storage_offset() % t.numel() == 0
    return aligned and t.storage_offset() - before.storage_offset() == t.numel()


def stacked_state(states: Sequence[MatrixState]) -> MatrixState:
    """Return the state of matrices that follow each other in memory as views with a first dim."""
    return {name: _stacked(t, len(states)) for name, t in states[0].items()}


def _stacked(first: Tensor, count: int) -> Tensor:
    whole = base(first)
    if count == 1 or whole is None:
        return first.unsqueeze(0)
    begin = (first.storage_offset() - whole.storage_offset()) // first.numel()
    return whole[begin : begin + count]


def finite(tensors: Sequence[Tensor], stacked: bool) -> Tensor:
    """Return a flag: whether all elements of a matrix's tensors are finite.

    If the tensors are stacked, return a flag for each matrix.
    """
    inexact = [t for t in tensors if is_inexact(t)]
    flags = [_finite(t, stacked) for t in inexact or tensors]
    return flags[0] if len(flags) == 1 else torch.stack(flags).all(0)


def _finite(t: Tensor, stacked: bool) -> Tensor:
    if t.is_cpu and t.is_floating_point() and t.numel() and (not stacked or len(t) == 1):
        flag = torch.stack(torch.aminmax(t)).isfinite().all()  # 30 times as fast as t.isfinite()
        return flag.unsqueeze(0) if stacked else flag
    flags = t.isfinite()
    return flags.flatten(1).all(1) if stacked else flags.all()
