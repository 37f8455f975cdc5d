"""Memory for what stays in the cache: on CPU, fresh memory costs more than the arithmetic."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE = 2**20  # numbers that are worked on at a time


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
