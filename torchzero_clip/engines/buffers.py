"""Buffers: lists of tensors that compiled programs read and write, kept from step to step.

A `Buffer` holds a list of tensors, such as the parameters of one bucket. It also stores the
addresses, dtypes, shapes and strides of the tensors. Compiled programs and replayed steps read the
addresses from the buffer and never ask a tensor.

`Buffers` keeps the buffers of an engine, because checking an existing buffer takes less time than
making a new one. Each step checks that the tensors of a buffer are still at the stored addresses
before a program uses the buffer. So no program writes to memory that a tensor no longer uses.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, addresses, extent, same_shapes

BUFFERS_KEPT = 1000


class Buffer:
    """A list of tensors that programs read and write, with their addresses and layouts.

    Attributes:
        tensors: The tensors.
        addresses: The address of each tensor, as an array that native code can read.
        forms: The dtypes and layouts of the tensors, as `_forms` returns them.
        dtype: The dtype of the first tensor.
        contiguous: Whether every tensor is contiguous and none is a lazily negated or conjugated
            view.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.addresses = _addresses(tensors)
        self.forms = _forms(tensors)
        self.dtype = tensors[0].dtype
        is_lazy = any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors))
        self.contiguous = all(self.forms[1]) and not is_lazy
        self._fits: tuple[Buffer, bool] | None = None  # the last answer of `fits`

    def with_tensors(self, tensors: Sequence[Tensor], addresses: array[int]) -> Buffer:
        """Return a buffer of other tensors that have these addresses and the same forms."""
        buffer = object.__new__(Buffer)
        vars(buffer).update(vars(self), tensors=list(tensors), addresses=addresses, _fits=None)
        vars(buffer).pop("spans", None)  # a cached property that depends on addresses
        return buffer

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the buffer holds exactly these tensors, unchanged in address and form."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        return _addresses(tensors) == self.addresses and _forms(tensors) == self.forms

    @cached_property
    def dense(self) -> list[bool]:
        """Whether each tensor fills its memory without gaps. The dims may be in any order."""
        if self.contiguous:
            return [True] * len(self.tensors)
        return list(map(_is_dense, self.tensors))

    @cached_property
    def spans(self) -> tuple[dict[int, int], int]:
        """A dictionary from the first to the end address of each tensor, and the number of tensors.

        Tensors without elements are not counted. If two tensors begin at the same address, the
        dictionary has fewer entries than there are tensors.
        """
        extents = list(map(Tensor.numel if self.contiguous else extent, self.tensors))
        size = self.dtype.itemsize
        ends = map(operator.add, self.addresses, [n * size for n in extents])
        spans = dict(zip(self.addresses, ends, strict=True))
        has_memory = list(map(bool, map(operator.mul, self.addresses, extents)))
        if not all(has_memory):
            spans = {start: end for start, end in spans.items() if 0 < start < end}
        return spans, sum(has_memory)

    def fits(self, params: Buffer) -> bool:
        """Return whether one program can use this buffer together with the parameters.

        The tensors of the buffer must have the shapes of the parameters and must not share memory
        with the parameters.
        """
        if self is params:
            return True
        if self._fits is None or self._fits[0] is not params:
            self._fits = (params, self._resembles(params) and disjoint([params, self]))
        return self._fits[1]

    def _resembles(self, params: Buffer) -> bool:
        """Return whether shapes and device match the parameters and programs support the dtype."""
        if not same_shapes(self.tensors, params.tensors):
            return False
        kinds = {(t.dtype, t.device) for t in self.tensors}
        dtype = self.dtype
        supported = dtype.is_floating_point or dtype in (torch.bool, torch.int16)
        return kinds == {(dtype, params.tensors[0].device)} and supported


class Buffers:
    """The buffers that an engine keeps from step to step. Each buffer has a key."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Buffer] = {}

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> Buffer:
        """Return a buffer of these tensors: the buffer that was kept under this key, or a new one.

        The kept buffer is returned only if its tensors and their addresses are unchanged.
        """
        buffer = self.known.get(key)
        if buffer is None or not buffer.same(tensors):
            if len(self.known) >= BUFFERS_KEPT:  # keys may belong to parameters that are gone
                self.known.clear()
            buffer = self.known[key] = Buffer(tensors)
        return buffer


def disjoint(buffers: Sequence[Buffer]) -> bool:
    """Return whether no two tensors of these buffers share memory.

    Comparing first addresses is not enough, because a view may begin in the middle of a tensor.
    """
    ends: dict[int, int] = {}
    for buffer in buffers:
        ends.update(buffer.spans[0])
    if len(ends) < sum([buffer.spans[1] for buffer in buffers]):
        return False
    starts = sorted(ends)
    return all(map(operator.le, map(ends.__getitem__, starts), starts[1:]))


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    """Return the addresses of tensors. The address of a fake tensor is 0."""
    return array("Q", addresses(tensors) or [0] * len(tensors))


def _forms(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return the dtypes of tensors, whether each tensor is contiguous, and the layouts of tensors.

    The layout of a contiguous tensor is its number of elements. Asking for shapes and strides
    instead would create two tuples per tensor at each call. That many new tuples would trigger the
    garbage collector.
    """
    dtypes = list(map(DTYPE, tensors))
    contiguous = list(map(Tensor.is_contiguous, tensors))
    if all(contiguous):
        return dtypes, contiguous, list(map(Tensor.numel, tensors))
    return dtypes, contiguous, list(map(SHAPE, tensors)), list(map(Tensor.stride, tensors))


def _is_dense(t: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps and is not a lazily negated view."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    return t.permute(order).is_contiguous() and not t.is_neg()
