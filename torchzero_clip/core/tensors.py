"""What kind of tensors these are: plain or sharded, of one shape, the rows of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

SMALL = 2**12  # numbers in a tensor that is not worth a call of its own, where there are
MANY = 16  # of one shape
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def wide(device: torch.device) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float32 if device.type == "mps" else torch.float64


def by_shape(tensors: Sequence[Tensor]) -> dict[torch.Size, list[int]]:
    """Which tensors have which shape."""
    shapes = [t.shape for t in tensors]
    if shapes.count(shapes[0]) == len(shapes):
        return {shapes[0]: list(range(len(shapes)))}
    found: dict[torch.Size, list[int]] = {}
    for i, shape in enumerate(shapes):
        found.setdefault(shape, []).append(i)
    return found


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor; to import that class takes half as long as torch itself."""
    return type(tensor) not in PLAIN and hasattr(tensor, "device_mesh")


def all_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether none is of a subclass: sharded, fake, traced."""
    return PLAIN.issuperset(map(type, tensors))


def whole_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, in order: part of the one that they were cut from."""
    base = None if torch.compiler.is_compiling() or not tensors else tensors[0]._base
    if base is None or base.shape[1:] != tensors[0].shape or base.dtype != tensors[0].dtype:
        return None
    step, start = base.element_size() * base.stride(0), tensors[0].data_ptr()
    if step == 0 or not base.is_contiguous():
        return None
    places = list(range(start, start + step * len(tensors), step))
    if list(map(Tensor.data_ptr, tensors)) != places or not _same_size(tensors):
        return None
    first, rest = divmod(start - base.data_ptr(), step)
    if rest or first + len(tensors) > len(base):
        return None
    return base if len(tensors) == len(base) else base[first : first + len(tensors)]


def _same_size(tensors: Sequence[Tensor]) -> bool:
    if tensors[0].dim() == 0:
        return not any(map(Tensor.dim, tensors))
    return len(set(map(Tensor.numel, tensors))) == 1 and all(map(Tensor.is_contiguous, tensors))


def separate(tensors: Sequence[Tensor]) -> bool:
    """Whether these are tensors of one kind that are no parts of a larger one."""
    if torch.compiler.is_compiling() or tensors[0]._base is not None or not all_plain(tensors):
        return False
    return len({(t.shape, t.dtype, t.device) for t in tensors}) == 1


def join(memories: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Give what is kept under these keys one memory: numbers, and small tensors of one shape."""
    for key in keys:
        held = [memory for memory in memories if isinstance(memory.get(key), Tensor)]
        for where in by_shape([memory[key] for memory in held]).values() if held else ():
            some = [held[i] for i in where]
            row = [memory[key] for memory in some]
            if _worth_it(row) and separate(row) and len(set(map(id, row))) == len(row):
                for memory, t in zip(some, torch.stack(row).unbind(), strict=True):
                    memory[key] = t


def _worth_it(row: Sequence[Tensor]) -> bool:
    if row[0].dim() == 0:
        return True
    small = row[0].device.type == "cpu" and 0 < row[0].numel() <= SMALL
    return small and len(row) >= MANY and all(map(Tensor.is_contiguous, row))
