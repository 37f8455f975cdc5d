"""Scratch: memory for the parts of tensors that norms convert and stack, small enough to be cached.

On CPU fresh memory costs more than arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 2**20  # numbers that are worked on at a time


class Scratch(threading.local):
    """Memory for PIECE numbers of each dtype, one for every thread."""

    def __init__(self) -> None:
        self.memory: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype) -> Tensor:
        """The memory of a dtype, with whatever values it has."""
        if dtype not in self.memory:
            self.memory[dtype] = torch.empty(PIECE, dtype=dtype, device="cpu")
        return self.memory[dtype]

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of tensors of one shape, PIECE numbers at most."""
        count, shape = len(tensors), tensors[0].shape
        room = self.get(tensors[0].dtype)[: count * shape.numel()].view(count, *shape)
        return torch.stack(list(tensors), out=room)


SCRATCH = Scratch()
