"""Sizes of work that stays in the cache: on CPU fresh memory costs more than arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PIECE = 2**20  # numbers that are worked on at a time
KINDS = 512  # of shapes whose parts are kept


class Rows(list[Tensor]):
    """Tensors that are the rows of one."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__(whole.unbind())
        self.whole = whole


class Scratch(threading.local):
    """PIECE numbers of each dtype, kept by every thread, and as many beside them."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[torch.dtype, bool], Tensor] = {}
        self.kinds: dict[Any, Any] = {}  # parts of the rooms, by what they are for
        self.piece: object = None  # the piece that is worked on, for who watches

    def get(self, dtype: torch.dtype, beside: bool = False) -> Tensor:
        """PIECE numbers, whatever they are."""
        if (dtype, beside) not in self.rooms:
            self.rooms[dtype, beside] = torch.empty(PIECE, dtype=dtype, device="cpu")
        return self.rooms[dtype, beside]

    def rows(self, tensors: Sequence[Tensor], beside: bool = False) -> Rows:
        """Memory for tensors of one shape, PIECE numbers at most."""
        dtype, shape, count = tensors[0].dtype, tensors[0].shape, len(tensors)
        key = dtype, shape, count, beside
        if key not in self.kinds:
            room = self.get(dtype, beside)[: count * shape.numel()]
            self._keep(key, Rows(room.view(count, *shape)))
        rows: Rows = self.kinds[key]
        return rows

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Memory for tensors of any shapes, one after another, PIECE numbers at most."""
        dtype, shapes = tensors[0].dtype, tuple([t.shape for t in tensors])
        key = dtype, shapes
        if key not in self.kinds:
            sizes = [shape.numel() for shape in shapes]
            rows = zip(self.get(dtype)[: sum(sizes)].split(sizes), shapes, strict=True)
            self._keep(key, [part.view(shape) for part, shape in rows])
        parts: list[Tensor] = self.kinds[key]
        return parts

    def _keep(self, key: Any, parts: Any) -> None:
        if len(self.kinds) >= KINDS:
            self.kinds.clear()
        self.kinds[key] = parts

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """A copy of tensors of one shape, PIECE numbers at most."""
        rows = self.rows(tensors)
        if tensors[0].data_ptr() == rows[0].data_ptr():  # it may be there
            torch._foreach_copy_(rows, list(tensors))
            return rows.whole
        return torch.stack(list(tensors), out=rows.whole)


SCRATCH = Scratch()
