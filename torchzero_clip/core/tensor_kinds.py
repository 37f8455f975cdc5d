"""Kinds of tensors: plain or sharded, real or fake, and tensors that share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core.torch_private import FakeTensor, base

SHAPE = operator.attrgetter("shape")
DTYPE = operator.attrgetter("dtype")
DEVICE = operator.attrgetter("device")
LAYOUT = operator.attrgetter("layout")
REAL = frozenset((Tensor, torch.nn.Parameter))
"""The classes of tensors that have values."""
PLAIN = REAL | {FakeTensor}
"""The classes of tensors that are not shards and that have separate memory."""
SMALL = 2**12  # elements of a tensor that is not worth a call of its own
FEW = 4  # tensors for which a scalar is not worth a tensor


def wide(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 if the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def same_shapes(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors have the shapes of other tensors, without a list of the shapes."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace an attrgetter
        return [t.shape for t in some] == [t.shape for t in others]
    return all(map(operator.eq, map(SHAPE, some), map(SHAPE, others)))


def is_inexact(t: Tensor) -> bool:
    """Return whether a tensor has a floating-point or complex dtype."""
    return t.is_floating_point() or t.is_complex()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, without the slow import of that class."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are plain: none may be sharded or traced."""
    return PLAIN.issuperset(map(type, tensors))


def all_real(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are plain and none is fake."""
    return REAL.issuperset(map(type, tensors))


def all_here(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are plain and have memory, on a real or a simulated device."""
    if all_real(tensors):
        return True
    simulated = all_plain(tensors) and not any([t.is_cpu for t in tensors])
    return simulated and addresses(tensors) is not None


def addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the addresses of tensors in memory, or None if a fake tensor has no address.

    A fake tensor has an address if its storage has an attribute `address`. `torchzero_clip.audit`
    sets this attribute. Fake tensors of a recorded step have no address.
    """
    if all_real(tensors):
        return list(map(Tensor.data_ptr, tensors))
    starts = [getattr(t.untyped_storage(), "address", None) for t in tensors]
    if None in starts:
        return None
    rows = zip(starts, tensors, strict=True)
    return [start + t.storage_offset() * t.element_size() for start, t in rows if start is not None]


def extent(t: Tensor) -> int:
    """Return the distance in memory from the first to the last element, both included."""
    steps = [(n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)]
    return 1 + sum(steps) if t.numel() else 0


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory of tensors.

    Empty tensors, and fake tensors without an address, are ignored.
    """
    memories = [(t.untyped_storage(), type(t) in REAL) for t in tensors]
    starts = [m.data_ptr() if real else getattr(m, "address", None) for m, real in memories]
    return {address for address in starts if address}


def share_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors as parts of one new tensor.

    Tensors that `shared_memory` finds, and tensors of several shapes, dtypes or devices, are
    returned unchanged.
    """
    if torch.compiler.is_compiling() or not all_plain(tensors):
        return list(tensors)
    alike = len({(t.shape, t.dtype, t.device) for t in tensors}) == 1
    if not alike or shared_memory(tensors) is not None:
        return list(tensors)
    return list(torch.stack(list(tensors)).unbind())


def _are_entries(whole: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether 0-dim tensors are all elements of a vector, in order.

    `shared_memory` can find this out for all tensors. This function is faster, and it covers the
    most common case.
    """
    if whole.dim() != 1 or whole.numel() != len(tensors) or any(map(Tensor.dim, tensors)):
        return False
    if not (all_real(tensors) and whole.is_contiguous()):
        return False
    start = whole.data_ptr()
    size = whole.element_size()
    return list(map(Tensor.data_ptr, tensors)) == list(
        range(start, start + size * len(tensors), size)
    )


def shared_memory(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that `share_memory` has divided into these tensors, in order.

    If the tensors are only some parts of it, return a slice. Return None for all other tensors.
    """
    whole = None if torch.compiler.is_compiling() or not tensors else base(tensors[0])
    if whole is None or type(tensors[0]) not in PLAIN or whole.dtype != tensors[0].dtype:
        return None
    if _are_entries(whole, tensors):
        return whole
    if not whole.dim() or whole.shape[1:] != tensors[0].shape:
        return None
    step = whole.element_size() * whole.stride(0)
    starts = addresses([whole, *tensors])
    alike = not any(map(Tensor.dim, tensors))
    if tensors[0].dim():
        alike = len({t.shape for t in tensors}) == 1 and all(map(Tensor.is_contiguous, tensors))
    if step == 0 or starts is None or not (whole.is_contiguous() and alike):
        return None
    begin, start, *_ = starts
    if starts[1:] != list(range(start, start + step * len(tensors), step)):
        return None
    first, rest = divmod(start - begin, step)
    if rest or not 0 <= first <= len(whole) - len(tensors):  # after `t.data = ...`
        return None
    return whole if len(tensors) == len(whole) else whole[first : first + len(tensors)]
