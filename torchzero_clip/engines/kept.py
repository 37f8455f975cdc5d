"""Wide and Kept: lists in float32 of numbers that are stored in fewer bits, in the default engine.

One tensor after another is widened, worked on and stored, so that few numbers are in float32 at
once. With `compile=True` a kernel does all of this in its own pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group, Rule, State, updated
from torchzero_clip.core.formats import Nearest
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure, statistics
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines.pieces import Piece, of_piece, pieces

BATCH = 2**18
"""The elements that are scaled or converted at a time on CPU."""
LARGE = 2**24
"""The elements that are converted at a time on devices where a call costs more than its memory."""


class Wide(Lazy):
    """Parameters as a list in float32 to read. Every list that borrows it widens them again.

    Args:
        stored: The tensors that are stored.
        form: The format in which they are stored.
        guard: A function to call before they are read, if the step may be skipped.
    """

    __slots__ = ("form", "guard", "stored")

    dtype = torch.float32

    def __init__(
        self, stored: Sequence[Tensor], form: Nearest, guard: Callable[[], Any] | None = None
    ) -> None:
        super().__init__()
        self.stored = list(stored)
        self.form = form
        self.guard = guard

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def cut(self) -> bool:
        """Whether the elements of each tensor can be told by their place in memory."""
        return all([self.form.follows(i, t) for i, t in enumerate(self.stored)])

    def compute(self) -> list[Tensor]:
        if self.guard is not None:
            self.guard()
        return self.wide(Piece(0, len(self)))

    def borrow(self) -> TensorList:
        return Wide(self.stored, self.form) if self.pending else TensorList.borrow(self)

    def statistics(self, m: Measure) -> Tensor:
        if not self.pending:
            return super().statistics(m)
        columns = [statistics(self.wide(Piece(i, i + 1)), m) for i in range(len(self))]
        return torch.cat(columns, 1)

    def wide(self, piece: Piece) -> list[Tensor]:
        """Return a piece in float32, which `put` stores."""
        return [self.form.widen(*row) for row in self._rows(piece)]

    def put(self, piece: Piece, values: Sequence[Tensor]) -> None:
        """Store the new values of a piece."""
        for row, x in zip(self._rows(piece), values, strict=True):
            self.form.store(*row, x)

    def move(self, piece: Piece, values: Sequence[Tensor], a: float, b: float) -> None:
        """Compute w ← (1 - b) w - a u for the values of u in a piece."""
        for row, u in zip(self._rows(piece), values, strict=True):
            self.form.move(*row, u, a, b)

    def _rows(self, piece: Piece) -> list[tuple[int, Tensor, int | None]]:
        """Return the tensors of a piece as the methods of a format take them."""
        start = None if piece.stop is None else piece.start
        return [(i, t, start) for i, t in enumerate(piece.of(self.stored), piece.begin)]


class Kept(Wide):
    """State as a list in float32. It is widened when it is first read, and stored by `settle`."""

    __slots__ = ()

    def borrow(self) -> TensorList:
        return TensorList.borrow(self)

    def settle(self) -> None:
        """Store the values if they were read, since they may have changed."""
        if not self.pending:
            cuts = self.cut and all(map(Tensor.is_contiguous, [*self.stored, *self.tensors]))
            most = BATCH if self.stored[0].is_cpu else LARGE
            for piece in pieces(self.stored, cuts, most, grows=False):
                self.put(piece, piece.of(self.tensors))
        self._tensors = None


def updated_in_turn(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """Return the result of `updated`.

    If some of the state is stored in bfloat16, one tensor of it is in float32 at a time.
    """
    kept = {name: row for name, row in state.items() if isinstance(row, Kept)}
    unread = all([row.pending for row in kept.values()])
    if not kept or not unread or rule.reach != "tensor":
        return updated(rule, u, state, group)
    made: list[Tensor] = []
    for piece in [Piece(i, i + 1) for i in range(len(u))]:
        held = {name: _part(row, piece, owned=True) for name, row in state.items()}
        flowing = TensorList(piece.of(u.tensors), owned=u.owned)
        live = {name: _part(x, piece) for name, x in group.items()}
        made += updated(rule, flowing, held, live).own().tensors
        for name, row in kept.items():
            row.put(piece, held[name].tensors)
    return TensorList(made, owned=True)


def _part(x: Any, piece: Piece, owned: bool = False) -> Any:
    """Return a piece of a list or of an operand; a piece of a stored list is widened."""
    if isinstance(x, Wide) and x.pending:
        if x.guard is not None:
            x.guard()
        return TensorList(x.wide(piece), owned=True)
    part = of_piece(x, piece)
    return TensorList(part.tensors, owned=True) if owned else part
