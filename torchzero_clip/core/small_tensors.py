"""Packs: small tensors on an accelerator side by side, so that they share a call.

A call costs there what a pass over a million numbers does. torch's foreach operators share one
among any number of tensors, but not where each has a number or a row of its own, and there are
not all of them. A tensor that is large keeps a call of its own, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import torch_private
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.tensor_kinds import all_plain

HOSTS = ("cpu",)  # devices on which a call costs little, and fresh memory much
LARGE = 2**20  # entries of a tensor whose pass costs more than a call
ROOM = 2**22  # entries that are packed together
FEW = 3  # tensors whose calls cost less than a pack


def shares(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors may share calls: on an accelerator, plain, and more than a few."""
    if len(tensors) < FEW or torch.compiler.is_compiling() or tensors[0].device.type in HOSTS:
        return False
    return all_plain(tensors)


def packs(tensors: Sequence[Tensor], kinds: Sequence[Any] | None = None) -> list[list[int]]:
    """The places of tensors that go together: those of a pack are of one kind, or one dtype."""
    kinds = [t.dtype for t in tensors] if kinds is None else kinds
    sizes = list(map(Tensor.numel, tensors))
    rows = enumerate(zip(tensors, sizes, kinds, strict=True))
    own = [(i,) if n >= LARGE or not t.is_contiguous() else kind for i, (t, n, kind) in rows]
    return batches(own, sizes, ROOM)


def in_packs(
    tensors: Sequence[Tensor],
    kinds: Sequence[Any] | None,
    one: Callable[[int], Tensor],
    several: Callable[[Sequence[int]], Iterable[Tensor]],
) -> list[Tensor]:
    """What is made of each tensor: by `one` of a place, by `several` of those of a pack."""
    every = packs(tensors, kinds)
    return in_order(every, lambda some: several(some) if len(some) > 1 else [one(some[0])])


def copies(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """New tensors with these values, in a dtype, or their own."""
    if dtype is None or dtype == tensors[0].dtype:
        return torch_private.clones(list(tensors))
    if not shares(tensors):
        return [t.to(dtype, copy=True) for t in tensors]
    made = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch_private.foreach("copy_", made, list(tensors))
    return made


def spread(numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """A number for each of some tensors, at each of its entries."""
    every = torch.cat([x.expand(t.numel()) for x, t in zip(numbers, tensors, strict=True)])
    return unpacked(every.to(tensors[0].dtype), tensors)


def stretched(rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """A row or a number for each of some tensors of one shape, at each of its entries."""
    shape, dtype = tensors[0].shape, tensors[0].dtype
    return list(torch.stack([x.expand(shape) for x in rows]).to(dtype).unbind())


def unpacked(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a pack, in the shapes of these tensors."""
    parts = whole.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def in_stacks(
    tensors: Sequence[Tensor],
    function: Callable[..., Tensor],
    alone: Callable[..., Tensor],
    kinds: Sequence[Any] | None = None,
) -> list[Tensor]:
    """What `alone` makes of each tensor, those of one shape, dtype and kind in one call.

    `function` makes it of tensors that are stacked, numbers as rows of one, and `alone` of one;
    both get the kind, if any.
    """
    rows = [()] * len(tensors) if kinds is None else [(kind,) for kind in kinds]
    if not shares(tensors):
        return [alone(t, *row) for t, row in zip(tensors, rows, strict=True)]

    def stacked(some: Sequence[int]) -> Iterable[Tensor]:
        stack = torch.stack([tensors[i] for i in some])
        return function(stack if stack.dim() > 1 else stack.unsqueeze(1), *rows[some[0]]).unbind()

    forms = [(t.dtype, t.shape, row) for t, row in zip(tensors, rows, strict=True)]
    return in_packs(tensors, forms, lambda i: alone(tensors[i], *rows[i]), stacked)


def outer(
    rows: Sequence[Tensor], columns: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """Outer products: of (…, n, 1) with (…, 1, m), in the shapes of these tensors."""
    if not shares(like):
        return list(map(torch.mul, rows, columns))

    def stacked(some: Sequence[int]) -> Iterable[Tensor]:
        sides = [torch.stack([side[i] for i in some]) for side in (rows, columns)]
        return torch.mul(*sides).unbind()

    forms = [(a.shape, b.shape) for a, b in zip(rows, columns, strict=True)]
    return in_packs(like, forms, lambda i: rows[i] * columns[i], stacked)
