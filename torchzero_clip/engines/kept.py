"""Wide and Kept: lists of low-precision tensors that the default engine reads in float32.

If possible, the engine converts one tensor at a time to float32, to save memory. It updates and
stores this tensor before it converts the next one. With `compile=True` these classes are not
needed, because compiled kernels convert each element while they run.
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
"""The number of elements that the engine scales or converts at a time on CPU."""
LARGE = 2**24
"""The number of elements that the engine converts at a time on accelerators.

This is more than on CPU, because each call to an accelerator takes time.
"""


class Wide(Lazy):
    """A read-only list of parameters in float32. Each borrowed list converts the parameters again.

    Args:
        stored: The stored tensors.
        form: The format of the stored tensors.
        guard: A function that is called before the first conversion, or None. It is needed if a
            guard may skip the step.
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
        """Whether tensors can be cut into pieces.

        They can if the position of each element in memory equals the index of the element.
        """
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
        """Return the tensors of a piece, converted to float32. `put` stores new values."""
        return [self.form.widen(*row) for row in self._rows(piece)]

    def put(self, piece: Piece, values: Sequence[Tensor]) -> None:
        """Store new float32 values of a piece in the format of the list."""
        for row, x in zip(self._rows(piece), values, strict=True):
            self.form.store(*row, x)

    def move(self, piece: Piece, values: Sequence[Tensor], a: float, b: float) -> None:
        """Compute w ← (1 - b) w - a u for a piece w of the list, where u is `values`."""
        for row, u in zip(self._rows(piece), values, strict=True):
            self.form.move(*row, u, a, b)

    def _rows(self, piece: Piece) -> list[tuple[int, Tensor, int | None]]:
        """Return the arguments that identify each tensor of a piece in calls to the format.

        They are the index of the tensor, the tensor or its elements, and the start of the elements.
        """
        start = None if piece.stop is None else piece.start
        return [(i, t, start) for i, t in enumerate(piece.of(self.stored), piece.begin)]


class Kept(Wide):
    """A list of optimizer state in float32.

    State is converted when a link first reads it. `settle` stores the values afterward.
    """

    __slots__ = ()

    def borrow(self) -> TensorList:
        return TensorList.borrow(self)

    def settle(self) -> None:
        """Store the values if a link has read them. The link may also have changed the values."""
        if not self.pending:
            cuts = self.cut and all(map(Tensor.is_contiguous, [*self.stored, *self.tensors]))
            size = BATCH if self.stored[0].is_cpu else LARGE
            for piece in pieces(self.stored, cuts, size, grows=False):
                self.put(piece, piece.of(self.tensors))
        self._tensors = None


def updated_in_turn(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """Return the result of `updated(rule, u, state, group)`, and need less memory if possible.

    If state is stored in bfloat16, only one tensor of the state is in float32 at a time.
    """
    narrow = {name: row for name, row in state.items() if isinstance(row, Kept)}
    unread = all([row.pending for row in narrow.values()])
    if not narrow or not unread or rule.reach != "tensor":
        return updated(rule, u, state, group)
    results: list[Tensor] = []
    for piece in [Piece(i, i + 1) for i in range(len(u))]:
        wide = {name: _part(row, piece, owned=True) for name, row in state.items()}
        part = TensorList(piece.of(u.tensors), owned=u.owned)
        live = {name: _part(x, piece) for name, x in group.items()}
        results += updated(rule, part, wide, live).own().tensors
        for name, row in narrow.items():
            row.put(piece, wide[name].tensors)
    return TensorList(results, owned=True)


def _part(x: Any, piece: Piece, owned: bool = False) -> Any:
    """Return a piece of a list or other operand, converted to float32 if it is a `Wide` list."""
    if isinstance(x, Wide) and x.pending:
        if x.guard is not None:
            x.guard()
        return TensorList(x.wide(piece), owned=True)
    part = of_piece(x, piece)
    return TensorList(part.tensors, owned=True) if owned else part
