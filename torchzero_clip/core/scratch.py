"""Sizes of work that stays in the cache: on CPU fresh memory costs more than arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 2**20  # numbers that are worked on at a time
SMALL = 2**12  # numbers in a tensor that is not worth a call of its own, where there are
MANY = 16  # of one shape
KINDS = 64  # of shapes whose parts are kept


class Scratch(threading.local):
    """PIECE numbers of each dtype, kept by every thread."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}
        self.parts: dict[tuple[torch.dtype, torch.Size, int], list[Tensor]] = {}

    def get(self, dtype: torch.dtype) -> Tensor:
        """PIECE numbers, whatever they are."""
        if dtype not in self.rooms:
            self.rooms[dtype] = torch.empty(PIECE, dtype=dtype, device="cpu")
        return self.rooms[dtype]

    def stack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A copy of tensors of one shape, PIECE numbers at most: all, and each by itself."""
        shape, dtype = tensors[0].shape, tensors[0].dtype
        room = self.get(dtype)[: len(tensors) * shape.numel()].view(-1, *shape)
        torch.stack(list(tensors), out=room)
        key = dtype, shape, len(tensors)
        if key not in self.parts:
            if len(self.parts) >= KINDS:
                self.parts.clear()
            self.parts[key] = list(room.unbind())
        return room, self.parts[key]


SCRATCH = Scratch()
