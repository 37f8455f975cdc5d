"""Kept: lists in float32 of numbers that are kept in fewer bits, in the eager engine.

A tensor after the other is widened, worked on and stored; torch's fused optimizers get pieces. So
few numbers are in float32 at once. It is the plain way; with compile=True a kernel does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group, Rule, State, updated
from torchzero_clip.core.formats import Nearest
from torchzero_clip.core.norms import Measure, statistics
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines.pieces import InPieces, Piece, of_piece, piece_of, pieces

BATCH = 2**18  # numbers that are scaled or converted at a time
LARGE = 2**24  # the same on devices whose calls cost more than their memory


class Wide(InPieces):
    """Parameters as a list in float32, to be read: a piece of it is made whenever one is asked for.

    Args:
        stored: The tensors that are kept.
        form: The format that they are kept in.
        guard: Called before they are read, where the step may be skipped.
    """

    __slots__ = ("form", "guard", "stored")

    recomputes = True
    dtype = torch.float32

    def __init__(
        self, stored: Sequence[Tensor], form: Nearest, guard: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(TensorList(stored))
        self.stored, self.form, self.guard = self.source.tensors, form, guard

    @property
    def cut(self) -> bool:
        return all([self.form.follows(i, t) for i, t in enumerate(self.stored)])

    def compute(self) -> list[Tensor]:
        return self.piece(Piece(0, len(self))).tensors

    def borrow(self) -> TensorList:
        again = self.pending and self.recomputes
        return Wide(self.stored, self.form) if again else TensorList.borrow(self)

    def statistics(self, m: Measure) -> Tensor:
        if not self.pending:
            return super().statistics(m)
        return torch.cat([statistics(self.wide(Piece(i, i + 1)), m) for i in range(len(self))], 1)

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        if self.guard is not None:
            self.guard()
        return TensorList(self.wide(piece), owned=True)

    def wide(self, piece: Piece) -> list[Tensor]:
        """A piece in float32, which `put` keeps."""
        return [self.form.widen(*row) for row in self._rows(piece)]

    def put(self, piece: Piece, values: Sequence[Tensor]) -> None:
        """Keep the new values of a piece."""
        for row, x in zip(self._rows(piece), values, strict=True):
            self.form.store(*row, x)

    def move(self, piece: Piece, values: Sequence[Tensor], a: float, b: float) -> None:
        """w ← (1 - b) w - a u, for the values of u in a piece."""
        for row, u in zip(self._rows(piece), values, strict=True):
            self.form.move(*row, u, a, b)

    def _rows(self, piece: Piece) -> list[tuple[int, Tensor, int | None]]:
        """The tensors of a piece as a format asks for them."""
        at = None if piece.stop is None else piece.start
        return [(i, t, at) for i, t in enumerate(piece.of(self.stored), piece.begin)]


class Kept(Wide):
    """State as a list in float32, converted when it is first read, and kept when it is settled."""

    __slots__ = ()

    recomputes = False

    def settle(self) -> None:
        """Keep what was read, and may have changed: a tensor after the other, in pieces."""
        if not self.pending:
            cuts = self.cut and all(map(Tensor.is_contiguous, [*self.stored, *self.tensors]))
            most = BATCH if self.stored[0].is_cpu else LARGE
            for piece in pieces(self.stored, cuts, most, grows=False):
                self.put(piece, piece.of(self.tensors))
        self._tensors = None


def updated_in_turn(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """What `updated` gives; of state that is kept in bfloat16, one tensor is wide at a time."""
    kept = [held for held in state.values() if isinstance(held, Kept)]
    read = any([not held.pending for held in kept])  # and perhaps written
    if read or not (kept and rule.reach == "tensor"):
        return updated(rule, u, state, group)
    made: list[Tensor] = []
    for piece in [Piece(i, i + 1) for i in range(len(u))]:
        mine = {name: piece_of(held, piece) for name, held in state.items()}
        flowing = TensorList(piece.of(u.tensors), owned=u.owned)
        out = updated(rule, flowing, mine, {name: of_piece(x, piece) for name, x in group.items()})
        made += out.own().tensors
        for held, now in zip(state.values(), mine.values(), strict=True):
            if isinstance(held, Kept):
                held.put(piece, now.tensors)
    return TensorList(made, owned=True)
