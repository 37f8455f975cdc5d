"""Packs: small tensors on an accelerator are joined into one tensor, so that they share a call.

On an accelerator, a call takes as long as a pass over a million elements. torch's foreach operators
already process many tensors in one call. But some operators have no foreach version, and some
foreach operators make one call per tensor if each tensor has its own scalar or row as operand.
Large tensors are not packed, because then a copy would take longer than a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import torch_private
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.tensor_kinds import all_plain

HOSTS = ("cpu",)
"""Types of devices on which a call is cheap and new memory is expensive."""
LARGE = 2**20
"""Tensors with this number of elements, or with more elements, are not packed."""
ROOM = 2**22
"""The largest number of elements of a pack."""
FEWEST_TENSORS = 3
"""The smallest number of tensors that are packed."""


def shares(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors may share calls: enough plain tensors on an accelerator."""
    if len(tensors) < FEWEST_TENSORS or torch.compiler.is_compiling():
        return False
    return tensors[0].device.type not in HOSTS and all_plain(tensors)


def packs(tensors: Sequence[Tensor], kinds: Sequence[Any] | None = None) -> list[list[int]]:
    """Return the indices of the tensors of each pack. A tensor may be alone in its pack.

    Args:
        tensors: The tensors.
        kinds: The kind of each tensor, by default its dtype. Tensors of a pack have the same kind.
    """
    if kinds is None:
        kinds = [t.dtype for t in tensors]
    sizes = list(map(Tensor.numel, tensors))
    pack_kinds = []
    for i, (t, size, kind) in enumerate(zip(tensors, sizes, kinds, strict=True)):
        alone = size >= LARGE or not t.is_contiguous()
        pack_kinds.append((i,) if alone else kind)
    return batches(pack_kinds, sizes, ROOM)


def in_packs(
    tensors: Sequence[Tensor],
    kinds: Sequence[Any] | None,
    one: Callable[[int], Tensor],
    several: Callable[[Sequence[int]], Iterable[Tensor]],
) -> list[Tensor]:
    """Compute a new tensor for each tensor, pack by pack.

    Args:
        tensors: The tensors.
        kinds: The kind of each tensor: see `packs`.
        one: A function of the index of a tensor. It computes the new tensor if the tensor is alone
            in its pack.
        several: A function of the indices of a pack's tensors. It computes the new tensors.
    """

    def compute(pack: list[int]) -> Iterable[Tensor]:
        return several(pack) if len(pack) > 1 else [one(pack[0])]

    return in_order(packs(tensors, kinds), compute)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return copies of tensors, in a dtype if one is given."""
    if dtype is None or dtype == tensors[0].dtype:
        return torch_private.clones(list(tensors))
    if not shares(tensors):
        return [t.to(dtype, copy=True) for t in tensors]
    converted = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch_private.foreach("copy_", converted, list(tensors))
    return converted


def expanded(rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Expand one scalar or row per tensor to the shape and dtype of its tensor.

    If there are rows, all tensors must have the same shape.
    """
    dtype = tensors[0].dtype
    if any(map(Tensor.dim, rows)):
        stack = torch.stack([x.expand(tensors[0].shape) for x in rows])
        return list(stack.to(dtype).unbind())
    pack = torch.cat([x.expand(t.numel()) for x, t in zip(rows, tensors, strict=True)])
    return unpacked(pack.to(dtype), tensors)


def unpacked(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Divide a pack into tensors with the shapes of other tensors."""
    parts = whole.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def in_stacks(
    tensors: Sequence[Tensor],
    function: Callable[..., Tensor],
    alone: Callable[..., Tensor],
    kinds: Sequence[Any] | None = None,
) -> list[Tensor]:
    """Compute a new tensor for each tensor. Tensors that are alike are stacked and share a call.

    Args:
        tensors: The tensors.
        function: A function that computes the new tensors for a stack of tensors. The stack has at
            least two dims. The first dim of the result has one element per tensor.
        alone: A function that computes the new tensor for one tensor.
        kinds: For each tensor, a further argument of both functions. The tensors of one stack have
            the same kind, shape and dtype.
    """
    arguments = [()] * len(tensors) if kinds is None else [(kind,) for kind in kinds]
    if not shares(tensors):
        return [alone(t, *args) for t, args in zip(tensors, arguments, strict=True)]

    def compute(pack: Sequence[int]) -> Iterable[Tensor]:
        stack = torch.stack([tensors[i] for i in pack])
        if stack.dim() == 1:
            stack = stack.unsqueeze(1)
        return function(stack, *arguments[pack[0]]).unbind()

    forms = [(t.dtype, t.shape, args) for t, args in zip(tensors, arguments, strict=True)]
    return in_packs(tensors, forms, lambda i: alone(tensors[i], *arguments[i]), compute)


def outer(
    rows: Sequence[Tensor], columns: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Tensor]:
    """Return the outer products of tensors of shape (…, n, 1) with tensors of shape (…, 1, m).

    Args:
        rows: The first factors.
        columns: The second factors.
        like: Tensors with the shapes of the products.
    """
    if not shares(like):
        return list(map(torch.mul, rows, columns))

    def multiply(pack: Sequence[int]) -> Iterable[Tensor]:
        stacked_rows = torch.stack([rows[i] for i in pack])
        stacked_columns = torch.stack([columns[i] for i in pack])
        return torch.mul(stacked_rows, stacked_columns).unbind()

    forms = [(a.shape, b.shape) for a, b in zip(rows, columns, strict=True)]
    return in_packs(like, forms, lambda i: rows[i] * columns[i], multiply)
