"""Buffers: lists of tensors that compiled programs read and write, kept from step to step.

A `Buffer` holds a list of tensors, such as the parameters of one bucket, together with their
addresses, dtypes, shapes and strides. Compiled programs and replayed steps receive buffers, so that
they never ask a tensor for its address themselves. `Buffers` keeps the buffers of an engine,
because it takes less time to compare tensors with a known buffer than to make a new one. Each step
makes this comparison before it uses a buffer, so no program writes to memory that a tensor has
left.
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
        forms: The dtypes and layouts of the tensors: see `_forms`.
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
        """Return a buffer of other tensors at these addresses, which have the same forms."""
        buffer = object.__new__(Buffer)
        vars(buffer).update(vars(self), tensors=list(tensors), addresses=addresses, _fits=None)
        vars(buffer).pop("spans", None)  # a cached property that depends on addresses
        return buffer

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the buffer's tensors, with unchanged addresses and forms."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        return _addresses(tensors) == self.addresses and _forms(tensors) == self.forms

    @cached_property
    def dense(self) -> list[bool]:
        """Whether each tensor fills its memory without gaps, in any order of its dims."""
        if self.contiguous:
            return [True] * len(self.tensors)
        return list(map(_is_dense, self.tensors))

    @cached_property
    def spans(self) -> tuple[dict[int, int], int]:
        """The end address of each tensor by its first address, and the number of tensors.

        Tensors without elements are not counted. The dictionary is shorter than the number if two
        tensors begin at one address.
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
        """Return whether one program can run over this buffer and the parameters.

        The tensors must have the shapes of the parameters and must not share memory with them.
        """
        if self is params:
            return True
        if self._fits is None or self._fits[0] is not params:
            self._fits = (params, self._resembles(params) and disjoint([params, self]))
        return self._fits[1]

    def _resembles(self, params: Buffer) -> bool:
        """Return whether shapes and device equal the parameters', and programs have the dtype."""
        if not same_shapes(self.tensors, params.tensors):
            return False
        kinds = {(t.dtype, t.device) for t in self.tensors}
        dtype = self.dtype
        supported = dtype.is_floating_point or dtype in (torch.bool, torch.int16)
        return kinds == {(dtype, params.tensors[0].device)} and supported


class Buffers:
    """The buffers that an engine keeps from step to step, by key."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Buffer] = {}

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> Buffer:
        """Return the buffer of tensors that have this key in every step.

        A buffer that was kept is used only if its tensors and their addresses are still the same.
        """
        buffer = self.known.get(key)
        if buffer is None or not buffer.same(tensors):
            if len(self.known) >= BUFFERS_KEPT:  # keys may belong to parameters that are gone
                self.known.clear()
            buffer = self.known[key] = Buffer(tensors)
        return buffer


def disjoint(buffers: Sequence[Buffer]) -> bool:
    """Return whether no tensor of these buffers shares memory with another one.

    Comparing first addresses is not enough: a view may begin in the middle of a tensor.
    """
    ends: dict[int, int] = {}
    for buffer in buffers:
        ends.update(buffer.spans[0])
    if len(ends) < sum([buffer.spans[1] for buffer in buffers]):
        return False
    starts = sorted(ends)
    return all(map(operator.le, map(ends.__getitem__, starts), starts[1:]))


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    """Return the addresses of tensors; zeros for fake tensors."""
    return array("Q", addresses(tensors) or [0] * len(tensors))


def _forms(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Return the dtypes of tensors, whether each is contiguous, and their layouts.

    The layout of contiguous tensors is their number of elements. Shapes and strides would be new
    tuples at each call, and so many new tuples would trigger the garbage collector.
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
