"""Packs: small tensors on an accelerator side by side, so that they share a call.

A call costs there what a pass over a million numbers does. torch's foreach operators share one
among any number of tensors, but not where each has a number or a row of its own, and there are
not all of them. A tensor that is large keeps a call of its own, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.tensors import all_plain

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
    made: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for i, t in enumerate(tensors):
        size = t.numel()
        if size >= LARGE or not t.is_contiguous():
            made.append([i])
            continue
        kind = t.dtype if kinds is None else kinds[i]
        some, total = open_.get(kind, ([], ROOM))
        if total + size > ROOM:
            some, total = [], 0
            made.append(some)
        some.append(i)
        open_[kind] = some, total + size
    return made


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The entries of tensors, one after another."""
    return torch.cat([t.view(-1) for t in tensors])


def spread(numbers: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """A number for each of some tensors, at each of its entries."""
    rows = zip(numbers, tensors, strict=True)
    every = torch.cat([x.expand(t.numel()) for x, t in rows])
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

    `function` makes it of tensors that are stacked, `alone` of one; both get the kind, if any.
    """
    rows = [()] * len(tensors) if kinds is None else [(kind,) for kind in kinds]
    if not shares(tensors):
        return [alone(t, *row) for t, row in zip(tensors, rows, strict=True)]
    out: list[Any] = [None] * len(tensors)
    forms = [(t.dtype, t.shape, row) for t, row in zip(tensors, rows, strict=True)]
    for some in packs(tensors, forms):
        if len(some) == 1:
            out[some[0]] = alone(tensors[some[0]], *rows[some[0]])
            continue
        made = function(torch.stack([tensors[i] for i in some]), *rows[some[0]])
        for i, x in zip(some, made.unbind(), strict=True):
            out[i] = x
    return out
