"""Kept: state in bfloat16 that a link sees in float32, in the eager engine.

A tensor after the other is widened, updated and rounded; torch's fused optimizers get parts. So few
numbers are in float32 at once. It is the plain way; with compile=True a kernel does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group, Rule, State, updated
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure, statistics
from torchzero_clip.core.stochastic import Rounding
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines.parts import Piece, of_piece

BATCH = 2**18  # numbers that are scaled or converted at a time
LARGE = 2**24  # the same on devices whose calls cost more than their memory


class Kept(Lazy):
    """State in bfloat16 as a list in float32, converted when it is first read.

    Args:
        stored: The tensors that are kept.
        rounding: How they are rounded.
        guard: Called before they are read, where the step may be skipped.
        first: The place of the first of them among those that the rounding knows.
    """

    __slots__ = ("first", "guard", "rounding", "stored")

    def __init__(
        self,
        stored: Sequence[Tensor],
        rounding: Rounding,
        guard: Callable[[], Any] | None = None,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.stored, self.rounding, self.guard, self.first = list(stored), rounding, guard, first

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def compute(self) -> list[Tensor]:
        if self.guard is not None:
            self.guard()
        return [t.float() for t in self.stored]

    def statistics(self, m: Measure) -> Tensor:
        return statistics(self.stored, m) if self.pending else super().statistics(m)

    def wide(self, piece: Piece) -> list[Tensor]:
        """A piece in float32, which `put` rounds."""
        return [t.float() for t in piece.of(self.stored)]

    def put(self, piece: Piece, values: Sequence[Tensor]) -> None:
        """Round the new values of a piece."""
        rows = zip(piece.of(self.stored), values, strict=True)
        for i, (target, x) in enumerate(rows, self.first + piece.begin):
            self.rounding.store(i, target.view(-1), x.view(-1), at=piece.start)

    def only(self, i: int) -> Kept:
        """The list of one of the tensors."""
        return Kept(self.stored[i : i + 1], self.rounding, self.guard, self.first + i)

    def in_order(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the elements of these tensors are one after another in their memory."""
        follow = self.rounding.elements.follow
        return all([follow(i, t) for i, t in enumerate(tensors, self.first)])

    def settle(self) -> None:
        """Round what was read, and may have changed: a tensor after the other, in parts."""
        pairs = [] if self.pending else zip(self.stored, self.tensors, strict=True)
        for i, (target, wide) in enumerate(pairs, self.first):
            follow, size = self.rounding.elements.follow, BATCH if target.is_cpu else LARGE
            if follow(i, target) and follow(i, wide):
                parts = zip(_vector(target).split(size), _vector(wide).split(size), strict=True)
                for k, part in enumerate(parts):
                    self.rounding.store(i, *part, at=k * size)
            else:
                self.rounding.store(i, target, wide)
        self._tensors = None


def _vector(t: Tensor) -> Tensor:
    """The memory of a tensor without gaps."""
    return t.as_strided((t.numel(),), (1,))


def updated_in_turn(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """What `updated` gives; of state that is kept in bfloat16, one tensor is wide at a time."""
    kept = [held for held in state.values() if isinstance(held, Kept)]
    read = any([not held.pending for held in kept])  # and perhaps written
    if read or not (kept and rule.reach == "tensor"):
        return updated(rule, u, state, group)
    made: list[Tensor] = []
    for i in range(len(u)):
        mine = {name: _only(held, i) for name, held in state.items()}
        flowing = _only(u, i)
        out = updated(rule, flowing, mine, {name: _only(x, i) for name, x in group.items()})
        made += (out if out.owned else flowing.copy_(out)).tensors
        for held in mine.values():
            if isinstance(held, Kept):
                held.settle()
    return TensorList(made, owned=True)


def _only(x: Any, i: int) -> Any:
    """Of a list one tensor; numbers are for all."""
    if isinstance(x, Kept):
        return x.only(i)
    if not isinstance(x, TensorList):
        return of_piece(x, Piece(i, i + 1))
    workspace = x.workspace

    def kept() -> list[Tensor] | None:
        memory = None if workspace is None else workspace()
        return None if memory is None else memory[i : i + 1]

    return TensorList(x.tensors[i : i + 1], owned=x.owned, workspace=kept if workspace else None)
