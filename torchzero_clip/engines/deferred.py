"""Deferred lists: Scaled, a · u + b · w, Owed, gradients that are still to be divided, and Guarded,
state of a step that may be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.foreach import copy_into
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.tensor_kinds import all_plain, storages
from torchzero_clip.core.tensorlist import TensorList, Workspace
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.engines.pieces import InPieces, Piece, cut, piece_of


class Scaled(InPieces):
    """a · source + b · parameters, in a dtype.

    Args:
        source: A list whose memory stays as it is until the step ends.
        a: A number, or a 0-dim tensor.
        b: A number.
        params: The parameters.
        dtype: The dtype of the result.
        movable: The list of these tensors that moves to a workspace when it is written.
    """

    __slots__ = ("_movable", "_params", "a", "b", "dtype")

    dtype: torch.dtype

    def __init__(
        self,
        source: TensorList,
        a: Any,
        b: float,
        params: TensorList,
        dtype: torch.dtype,
        movable: Callable[[TensorList], TensorList],
    ) -> None:
        super().__init__(source)
        self.a, self.b, self._params = a, b, params
        self.dtype, self._movable = dtype, movable

    def times(self, a: Any, b: float = 0.0) -> Scaled:
        """a · self + b · parameters."""
        if self.pending and not isinstance(self.a, Tensor):
            b = a * self.b + b if self.b else b
            return Scaled(self.source, a * self.a, b, self._params, self.dtype, self._movable)
        return Scaled(self, a, b, self._params, self.dtype, self._movable)

    def statistics(self, m: Measure) -> Tensor:
        alone = type(self.a) is float and (self.a, self.b) == (1, 0)
        return self.source.statistics(m) if self.pending and alone else super().statistics(m)

    def apart(self) -> tuple[TensorList, float, float]:
        """A list and two numbers, from which this one is a · list + b · parameters."""
        return (self, 1.0, 0.0) if isinstance(self.a, Tensor) else (self.source, self.a, self.b)

    @property
    def cut(self) -> bool:
        return cut(self._params)

    def compute(self) -> list[Tensor]:
        source = self.source
        u = source if source.owned else self._movable(TensorList(source.tensors))
        return self._of(u, self._params).own().tensors

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        params = piece_of(self._params, piece, keep=True)
        return self._of(piece_of(self.source, piece, keep), params)

    def _of(self, u: TensorList, params: TensorList) -> TensorList:
        u = u.to(self.dtype)
        if isinstance(self.a, Tensor):
            u = u.mul_(self.a)
        elif type(self.a) is not float or self.a != 1:
            u = times(u, self.a)
        return u.add_(params, alpha=self.b) if self.b else u


class Narrow(TensorList):
    """A borrowed list of half precision: its conversion waits for the next pass."""

    __slots__ = ("_widened",)

    def __init__(
        self,
        tensors: Sequence[Tensor],
        widened: Callable[[TensorList, torch.dtype], TensorList],
        workspace: Workspace,
    ) -> None:
        super().__init__(tensors, workspace=workspace)
        self._widened = widened

    def to(self, dtype: torch.dtype) -> TensorList:
        if self.owned or dtype == self.dtype:
            return self
        return self._widened(self.borrow(), dtype)  # this list may move before that is computed


class Guarded(Lazy):
    """State of a step that may be skipped: what reads or writes it has it made safe first.

    Args:
        held: The tensors, for a fused optimizer that looks at the flag by itself.
        guard: Called before anybody else sees them.
    """

    __slots__ = ("_guard", "held")

    def __init__(self, held: Sequence[Tensor], guard: Callable[[], Any]) -> None:
        super().__init__()
        self.held, self._guard = list(held), guard

    def __len__(self) -> int:
        return len(self.held)

    @property
    def dtype(self) -> torch.dtype:
        return self.held[0].dtype

    def compute(self) -> list[Tensor]:
        self._guard()
        return self.held


class Owed(Guarded):
    """Gradients that a link has written, but for a division that waits: whoever reads them has it
    done, and one of torch's fused optimizers does it in its own pass.

    A list that has moved to memory of its own holds other values: it must not be taken for the
    gradients any more.

    Args:
        held: The gradients.
        ratio: What they are to be divided by, in float32 on their device.
        debt: What does it, and nothing once it is done: lists that borrow these share it.
    """

    __slots__ = ("debt", "ratio")

    def __init__(self, held: Sequence[Tensor], ratio: Any, debt: list[Any]) -> None:
        super().__init__(held, lambda: [debt.pop()() for _ in debt[:]])
        self.ratio, self.debt = ratio, debt

    @property
    def waits(self) -> bool:
        """Whether these are the gradients, and nobody has divided them yet."""
        return self.pending and bool(self.debt)

    def borrow(self) -> TensorList:
        if not self.waits:
            return super().borrow()
        borrowed = Owed(self.held, self.ratio, self.debt)
        borrowed.owned = False
        return self._lend(borrowed)


def overlap(params: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether the values to subtract lie in the memory of the parameters."""
    return all_plain(params) and not storages(params).isdisjoint(storages(values))


def times(u: TensorList, factor: float) -> TensorList:
    """The list times a number, which may be larger or smaller than the dtype holds well."""
    rest, divisor = norms.halves(factor, u.dtype)
    u = u.mul_(rest)
    return u if divisor == 1 else u.div_(divisor)


def subtract_(params: list[Tensor], values: Sequence[Tensor], a: float, b: float = 0.0) -> None:
    """w ← (1 - b) w - a u"""
    if b:
        foreach("mul_", params, 1 - b)
    rest, divisor = norms.halves(a, params[0].dtype)
    if divisor != 1:
        values = foreach("div", [u.to(params[0].dtype) for u in values], divisor)
    wide = params
    if params[0].dtype != values[0].dtype:  # off the fast route of torch
        wide = small_tensors.copies(params, values[0].dtype)
    foreach("sub_", wide, list(values), alpha=rest)
    if wide is not params:
        copy_into(params, wide)
