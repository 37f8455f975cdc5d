"""Kinds of tensors: plain or sharded, of one shape, numbers that share a vector."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core.torch_private import FakeTensor, base

SHAPE, DTYPE, DEVICE, LAYOUT = map(operator.attrgetter, ("shape", "dtype", "device", "layout"))
REAL = frozenset((Tensor, torch.nn.Parameter))  # they have values, where these can be read
PLAIN = REAL | {FakeTensor}  # they are whole, and in memory of their own
SMALL = 2**12  # entries of a tensor that is not worth a call of its own
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
    """Whether none is of a subclass that may be sharded or traced."""
    return PLAIN.issuperset(map(type, tensors))


def all_real(tensors: Iterable[Tensor]) -> bool:
    """Whether all are plain, and none is fake."""
    return REAL.issuperset(map(type, tensors))


def all_here(tensors: Sequence[Tensor]) -> bool:
    """Whether all are plain and lie in memory, if only in that of an imagined device."""
    if all_real(tensors):
        return True
    imagined = all_plain(tensors) and not any([t.is_cpu for t in tensors])
    return imagined and addresses(tensors) is not None


def addresses(tensors: Sequence[Tensor]) -> list[int] | None:
    """Where tensors begin in memory; None where one is fake and has none, as in a recorded step.

    What is fake lies in memory where somebody has given its storage an `address`: see
    `torchzero_clip.audit`.
    """
    if all_real(tensors):
        return list(map(Tensor.data_ptr, tensors))
    starts = [getattr(t.untyped_storage(), "address", None) for t in tensors]
    if None in starts:
        return None
    rows = zip(starts, tensors, strict=True)
    return [start + t.storage_offset() * t.element_size() for start, t in rows if start is not None]


def extent(t: Tensor) -> int:
    """The number of places from the first entry to the last in memory, both included."""
    steps = [(n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)]
    return 1 + sum(steps) if t.numel() else 0


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory of tensors.

    Empty tensors have no memory, so that they share none, and neither have some fake ones.
    """
    held = [(t.untyped_storage(), type(t) in REAL) for t in tensors]
    found = [m.data_ptr() if real else getattr(m, "address", None) for m, real in held]
    return {address for address in found if address}


def share_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one shape and dtype as parts of one tensor; others as they are."""
    if torch.compiler.is_compiling() or not all_plain(tensors):
        return list(tensors)
    alike = len({(t.shape, t.dtype, t.device) for t in tensors}) == 1
    apart = all([base(t) is None for t in tensors])
    return list(torch.stack(list(tensors)).unbind()) if alike and apart else list(tensors)


def _are_entries(whole: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors without dims are all entries of a vector, in order.

    `shared_memory` finds that as well. This is faster, and the usual case.
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
    """The tensor that `share_memory` made of these, or the part of it that they are, in order."""
    whole = None if torch.compiler.is_compiling() or not tensors else base(tensors[0])
    if whole is None or type(tensors[0]) not in PLAIN or whole.dtype != tensors[0].dtype:
        return None
    if _are_entries(whole, tensors):
        return whole
    if not whole.dim() or whole.shape[1:] != tensors[0].shape:
        return None
    step, starts = whole.element_size() * whole.stride(0), addresses([whole, *tensors])
    alike = not any(map(Tensor.dim, tensors))
    if tensors[0].dim():
        alike = len({t.shape for t in tensors}) == 1 and all(map(Tensor.is_contiguous, tensors))
    if step == 0 or starts is None or not (whole.is_contiguous() and alike):
        return None
    begin, start, *_ = starts
    if starts[1:] != list(range(start, start + step * len(tensors), step)):
        return None
    first, rest = divmod(start - begin, step)
    if rest or not 0 <= first <= len(whole) - len(tensors):  # moved by `t.data = ...`
        return None
    return whole if len(tensors) == len(whole) else whole[first : first + len(tensors)]
