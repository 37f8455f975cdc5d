"""Sizes of work that stays in the cache: on CPU fresh memory costs more than arithmetic."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE = 2**20  # numbers that are worked on at a time
SMALL = 2**12  # numbers in a tensor that is not worth a call of its own, where there are
MANY = 16  # of one shape


class Scratch(threading.local):
    """PIECE numbers of each dtype, kept by every thread."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype) -> Tensor:
        """PIECE numbers, whatever they are."""
        if dtype not in self.rooms:
            self.rooms[dtype] = torch.empty(PIECE, dtype=dtype, device="cpu")
        return self.rooms[dtype]


SCRATCH = Scratch()
