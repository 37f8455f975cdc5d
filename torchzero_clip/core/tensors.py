"""Kinds of tensors: plain or sharded, of one shape, numbers that share a vector."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core.private import base

SHAPE, DTYPE, DEVICE, LAYOUT = map(operator.attrgetter, ("shape", "dtype", "device", "layout"))
PLAIN = frozenset((Tensor, torch.nn.Parameter))
SMALL = 2**12  # entries of a tensor that is not worth a call of its own, where there are
MANY = 16  # of one shape
FEW = 4  # tensors for which a number is not worth a tensor


def wide(device: torch.device) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float32 if device.type == "mps" else torch.float64


def same_shapes(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have the shapes of others, one by one, without a list of either."""
    if torch.compiler.is_compiling():  # which does not trace an attrgetter
        return [t.shape for t in some] == [t.shape for t in others]
    return all(map(operator.eq, map(SHAPE, some), map(SHAPE, others)))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor; to import that class takes half as long as torch itself."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether none is of a subclass: sharded, fake, traced."""
    return PLAIN.issuperset(map(type, tensors))


def share_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one shape and dtype as parts of one tensor; others as they are."""
    if torch.compiler.is_compiling() or not all_plain(tensors):
        return list(tensors)
    alike = len({(t.shape, t.dtype, t.device) for t in tensors}) == 1
    apart = all([base(t) is None for t in tensors])
    return list(torch.stack(list(tensors)).unbind()) if alike and apart else list(tensors)


def shared_memory(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `share_memory` made of these, or the part of it that they are, in order."""
    whole = None if torch.compiler.is_compiling() or not tensors else base(tensors[0])
    if (
        whole is None
        or type(tensors[0]) not in PLAIN
        or not whole.dim()
        or whole.dtype != tensors[0].dtype
    ):
        return None
    if whole.shape[1:] != tensors[0].shape:
        return None
    step, start = whole.element_size() * whole.stride(0), tensors[0].data_ptr()
    if step == 0 or not whole.is_contiguous():
        return None
    places = list(range(start, start + step * len(tensors), step))
    if list(map(Tensor.data_ptr, tensors)) != places or not _one_size(tensors):
        return None
    first, rest = divmod(start - whole.data_ptr(), step)
    if rest or not 0 <= first <= len(whole) - len(tensors):  # moved by `t.data = ...`
        return None
    return whole if len(tensors) == len(whole) else whole[first : first + len(tensors)]


def _one_size(tensors: Sequence[Tensor]) -> bool:
    if tensors[0].dim() == 0:
        return not any(map(Tensor.dim, tensors))
    return len({t.shape for t in tensors}) == 1 and all(map(Tensor.is_contiguous, tensors))
