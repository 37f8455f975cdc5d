"""Buffers: lists of tensors that programs read and write, remembered between steps.

A buffer is compared with the tensors before it is used again: in every step their addresses,
shapes, strides and dtypes are read afresh, so that no program writes where a tensor once was.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, addresses, extent, same_shapes

MOST = 1000  # buffers that are remembered


class Buffer:
    """A list of tensors that a trace reads and writes, with their addresses and forms."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.addresses, self.forms = _addresses(tensors), _forms(tensors)
        self.dtype = tensors[0].dtype
        turned = any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors))
        self.contiguous = all(self.forms[1]) and not turned
        self._fits: tuple[Buffer, bool] | None = None

    def moved(self, tensors: Sequence[Tensor], places: array[int]) -> Buffer:
        """Others of the same forms, at other addresses."""
        made = object.__new__(Buffer)
        vars(made).update(vars(self), tensors=list(tensors), addresses=places, _fits=None)
        for name in ("vectors", "spans", "ranges"):  # which depend on the memory
            vars(made).pop(name, None)
        return made

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, in the memory and of the form that they had."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        return _addresses(tensors) == self.addresses and _forms(tensors) == self.forms

    @cached_property
    def vectors(self) -> list[Tensor | None]:
        """The same memory as vectors that are no views of the tensors; None where it has gaps."""
        if self.contiguous:
            return [t.view(-1).data for t in self.tensors]
        return [_vector(t) for t in self.tensors]

    @cached_property
    def spans(self) -> tuple[dict[int, int], int]:
        """The addresses at which tensors begin and end, and how many have memory."""
        extents = list(map(Tensor.numel if self.contiguous else extent, self.tensors))
        size = self.dtype.itemsize
        ends = map(operator.add, self.addresses, [n * size for n in extents])
        spans = dict(zip(self.addresses, ends, strict=True))
        held = list(map(bool, map(operator.mul, self.addresses, extents)))
        if not all(held):
            spans = {start: end for start, end in spans.items() if 0 < start < end}
        return spans, sum(held)

    @cached_property
    def ranges(self) -> tuple[list[int], list[int]]:
        """The addresses at which tensors begin, sorted, and for each count of them the last end.

        Both are for `overlap`; the first end is 0, for no tensor.
        """
        size = self.dtype.itemsize
        lengths = [extent(t) * size for t in self.tensors]
        rows = [(start, start + n) for start, n in zip(self.addresses, lengths, strict=True)]
        rows = sorted([(start, end) for start, end in rows if 0 < start < end])
        ends = list(itertools.accumulate([end for _, end in rows], max, initial=0))
        return [start for start, _ in rows], ends

    def fits(self, params: Buffer) -> bool:
        """Whether a program may work on these as on the parameters: equal shapes, own memory."""
        if self is params:
            return True
        if self._fits is None or self._fits[0] is not params:
            self._fits = (params, self._alike(params) and apart([params, self]))
        return self._fits[1]

    def _alike(self, params: Buffer) -> bool:
        if not same_shapes(self.tensors, params.tensors):
            return False
        kinds = {(t.dtype, t.device) for t in self.tensors}
        dtype, device = self.dtype, params.tensors[0].device
        known = dtype.is_floating_point or dtype in (torch.bool, torch.int16)
        return kinds == {(dtype, device)} and known


class Buffers:
    """The buffers that an engine remembers from step to step."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Buffer] = {}

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> Buffer:
        """The buffer of the tensors that have this key in every step."""
        buffer = self.known.get(key)
        if buffer is None or not buffer.same(tensors):
            if len(self.known) >= MOST:  # parameters come and go
                self.known.clear()
            buffer = self.known[key] = Buffer(tensors)
        return buffer


def apart(buffers: Sequence[Buffer]) -> bool:
    """Whether no two tensors of these buffers share memory."""
    ends: dict[int, int] = {}
    for buffer in buffers:
        ends.update(buffer.spans[0])
    if len(ends) < sum([buffer.spans[1] for buffer in buffers]):
        return False
    starts = sorted(ends)
    return all(map(operator.le, map(ends.__getitem__, starts), starts[1:]))


def overlap(one: Buffer, other: Buffer) -> bool:
    """Return whether a tensor of one buffer spans memory of a tensor of the other.

    Where tensors begin does not say it: a view may begin in the middle of a tensor.
    """
    starts, ends = one.ranges
    size = other.dtype.itemsize
    for start, t in zip(other.addresses, other.tensors, strict=True):
        end = start + extent(t) * size
        if 0 < start < end and start < ends[bisect_left(starts, end)]:
            return True
    return False


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", addresses(tensors) or [0] * len(tensors))


def _forms(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """All that says which memory tensors are, besides their addresses.

    Of contiguous ones that is their size; shapes and strides are new tuples each time, which would
    keep the garbage collector busy.
    """
    dtypes, contiguous = list(map(DTYPE, tensors)), list(map(Tensor.is_contiguous, tensors))
    if all(contiguous):
        return dtypes, contiguous, list(map(Tensor.numel, tensors))
    return dtypes, contiguous, list(map(SHAPE, tensors)), list(map(Tensor.stride, tensors))


def _vector(t: Tensor) -> Tensor | None:
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    t = t.permute(order)
    return t.view(-1).data if t.is_contiguous() and not t.is_neg() else None
