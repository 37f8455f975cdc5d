"""Fingerprints: one number for the bits of a tensor, in place of a copy of the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.sharding.layout import local

PIECE = 2**22
"""The number of elements that are read at once. A piece needs about 24 bytes per element."""
MULTIPLIER = -7046029254386353131
"""An odd number of 64 bits without a pattern. It makes the weights of neighbors unrelated."""
SHIFT = 29
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> int:
    """Return an integer that depends on every bit of a tensor, and on its place in the tensor.

    A change of one element always changes the fingerprint. For a DTensor, the fingerprint covers
    the shard of this rank.
    """
    values = local(tensor).detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    bits = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + len(piece), device=piece.device)
        weights = places * MULTIPLIER
        weights ^= weights >> SHIFT
        weights |= 1  # an odd weight keeps every difference of one element
        total += (piece * weights).sum()
    return int(total)


def tensors_in(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the state of a parameter, each with the keys that lead to it."""
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from tensors_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from tensors_in(value, f"{path}.{i}")
