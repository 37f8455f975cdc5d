"""Parts: on an accelerator a chain goes over some of the tensors at a time, from end to end.

Fresh memory is then that of a piece, however large the model is: what a link makes waits for the
subtraction, which asks for it piece by piece. A large tensor is several pieces where nothing on the
way looks at more than an entry. Whoever reads a list before gets all of it, as anywhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.engine import Group, State, updated
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.stacks import portion
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.torch_private import foreach

PIECE = 2**21  # entries that go through a chain together: eight lists of them are 64 MiB


class Piece(NamedTuple):
    """Some tensors of a list, or (from `start` to `stop`) entries of one of them."""

    begin: int
    end: int
    start: int = 0
    stop: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This piece of some tensors; a number is the same in all pieces."""
        some = list(tensors[self.begin : self.end])
        if self.stop is None or not some or not some[0].dim():
            return some
        return [some[0].view(-1)[self.start : self.stop]]


def pieces(
    tensors: Sequence[Tensor], cuts: bool, most: int | None = None, grows: bool = True
) -> Iterator[Piece]:
    """The pieces of tensors, of `most` entries; a larger tensor in several where it may be cut.

    Of a large bucket they are larger where it `grows`, so that a step calls no more of them.
    """
    most = PIECE if most is None else most
    most = portion(tensors, most) if grows else most
    begin, total = 0, 0
    for i, t in enumerate(tensors):
        size = t.numel()
        if begin < i and total + size > most:
            yield Piece(begin, i)
            begin, total = i, 0
        if cuts and size > most and t.is_contiguous():
            for start in range(0, size, most):
                yield Piece(i, i + 1, start, min(start + most, size))
            begin, total = i + 1, 0
        else:
            total += size
    if begin < len(tensors):
        yield Piece(begin, len(tensors))


class InPieces(Lazy):
    """A list that can be computed piece by piece. Write `piece`, and `source` is what it reads."""

    __slots__ = ()

    source: TensorList

    def __len__(self) -> int:
        return len(self.source)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def cut(self) -> bool:
        """Whether entries can be computed by themselves."""
        raise NotImplementedError

    @property
    def recomputes(self) -> bool:
        """Whether pieces may be computed more than once, since no state is written, and nothing is
        kept from the first time, since memory is dearer than a pass.
        """
        if isinstance(self.source, InPieces) and self.source.pending:
            return self.source.recomputes
        return self.source.tensors[0].device.type not in small_tensors.HOSTS

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        """A piece of it, computed now; `keep` has what it reads stay as it is."""
        raise NotImplementedError

    def borrow(self) -> TensorList:
        if self.pending and self.recomputes:
            return self._lend(Borrowed(self))
        return super().borrow()

    def write_into(self, target: TensorList, name: str, operands: Sequence[Any]) -> None:
        """Run an operator in place that has this list as an operand."""
        whole = target.tensors
        cuts = all([_is_cut(x, whole) for x in operands]) and all(map(Tensor.is_contiguous, whole))
        for piece in pieces(whole, cuts):
            made = TensorList(piece.of(whole), owned=True)
            made._write(name, *[of_piece(x, piece) for x in operands])

    def compute(self) -> list[Tensor]:
        every = list(pieces(bottom(self).tensors, cut(self)))
        if len(every) == 1:
            return self.piece(every[0]).own().tensors
        made = [torch.empty_like(t, dtype=self.dtype) for t in bottom(self).tensors]
        for piece in every:
            foreach("copy_", piece.of(made), self.piece(piece).tensors)
        return made

    def statistics(self, m: Measure) -> Tensor:
        whole = bottom(self).tensors
        every = list(pieces(whole, cut(self))) if self.pending and self.recomputes else []
        if len(every) < 2:
            return super().statistics(m)
        columns: list[Tensor] = []
        for _, some in itertools.groupby(every, lambda piece: piece.begin):  # of one tensor
            parts = list(some)
            found = [self.piece(piece, keep=True).statistics(m) for piece in parts]
            if len(parts) > 1:
                sizes = [(piece.stop or 0) - piece.start for piece in parts]
                counts = norms.numbers(sizes, found[0]).unsqueeze(0)
                found = [norms.merge(torch.stack(found, dim=2), counts, m)]
            columns += found
        return torch.cat(columns, dim=1)


def settle(u: TensorList, group: Group) -> None:
    """Compute what cannot be computed twice of u and of lists in a group that wait, as it may."""
    lists = [x for x in group.values() if isinstance(x, InPieces) and x.pending]
    for x in [u, *lists] if lists else ():
        if isinstance(x, InPieces) and x.pending and not x.recomputes:
            _ = x.tensors


def cut(u: TensorList) -> bool:
    """Whether a list can be had in pieces of its tensors."""
    if isinstance(u, InPieces) and u.pending:
        return u.cut and cut(u.source)
    return all(map(Tensor.is_contiguous, u.tensors))


def computes(u: TensorList) -> bool:
    """Whether the update of a rule waits on the way to a list, which needs memory of its own."""
    waits = isinstance(u, InPieces) and u.pending
    return waits and (isinstance(u, Updated) or computes(u.source))


def piece_of(u: TensorList, piece: Piece, keep: bool = False) -> TensorList:
    """A piece of a list, to be written unless what there is must be kept."""
    every = piece.stop is None and piece.end - piece.begin == len(u)
    if isinstance(u, InPieces) and u.pending and not (keep and every):  # else it is small, and kept
        return u.piece(piece, keep)
    return TensorList(piece.of(u.tensors), owned=u.owned and not keep)


def bottom(u: TensorList) -> TensorList:
    """The list that is there already, from which one is to be computed."""
    return bottom(u.source) if isinstance(u, InPieces) and u.pending else u


class Borrowed(InPieces):
    """A list as another one sees it that writes elsewhere."""

    cut = True

    def _leave(self) -> None:
        _ = self.tensors

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        return piece_of(self.source, piece, keep=True)


class Divided(InPieces):
    """A list that lies still, over an operand: a number for all, one a tensor, or slices."""

    __slots__ = ("over",)

    def __init__(self, source: TensorList, operand: Operand) -> None:
        super().__init__(source)
        self.over: Any = operand

    @property
    def cut(self) -> bool:
        return _is_cut(self.over, bottom(self).tensors)

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        return piece_of(self.source, piece, keep).div_(of_piece(self.over, piece))


class Updated(InPieces):
    """The update of a rule that takes each entry by itself; its state waits as well."""

    __slots__ = ("_done", "_group", "_kernel", "_rule", "_state")

    writes = True  # its state

    def __init__(
        self,
        source: TensorList,
        rule: Any,
        state: State,
        group: Group,
        done: Callable[[Updated], Any],
        kernel: Any = None,
    ) -> None:
        super().__init__(source)
        self._rule, self._state, self._group = rule, state, group
        self._done, self._kernel = done, kernel

    @property
    def cut(self) -> bool:
        lists = [*self._state.values(), *self._group.values()]
        return all([_is_cut(x, bottom(self).tensors) for x in lists])

    @property
    def recomputes(self) -> bool:
        return not (self.writes and self._state) and super().recomputes

    def compute(self) -> list[Tensor]:
        self._done(self)
        return super().compute()

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        if self._state:
            self._done(self)
        given = self._given(piece)
        return updated(self._rule, piece_of(self.source, piece, keep), *given)

    def _given(self, piece: Piece) -> tuple[State, Group]:
        """State and group of a piece."""
        state = {name: self._held(held, piece) for name, held in self._state.items()}
        return state, {name: of_piece(x, piece) for name, x in self._group.items()}

    def _held(self, held: TensorList, piece: Piece) -> TensorList:
        """State of a piece; numbers of a tensor that is cut are written with its last piece."""
        some = piece.of(held.tensors)
        if piece.stop is not None and not some[0].dim():
            whole = self._group["params"].tensors[piece.begin]
            if piece.stop < whole.numel():
                some = [some[0].clone()]
        return TensorList(some, owned=True)


class View(Updated):
    """What a function of entries makes that writes nothing: whoever reads it may compute it."""

    __slots__ = ()

    writes = False

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        made: TensorList = self._rule(piece_of(self.source, piece, keep=True), *self._given(piece))
        return made


def of_piece(x: Any, piece: Piece) -> Any:
    """An operand of a piece: of lists, and of vectors of a number for each tensor, a piece."""
    if isinstance(x, TensorList):
        return piece_of(x, piece, keep=True)
    if _is_list(x) or (isinstance(x, Tensor) and x.numel() > 1):
        return x[piece.begin : piece.end]
    return x


def _is_list(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and isinstance(x[0], Tensor)


def _is_cut(x: Any, whole: Sequence[Tensor]) -> bool:
    """Whether an operand has an entry beside each of these tensors, or one for all of a tensor."""
    if isinstance(x, InPieces) and x.pending:
        return cut(x)
    if not (isinstance(x, TensorList) or _is_list(x)):
        return True
    rows = zip(x, whole, strict=True)
    return all([not t.dim() or (t.is_contiguous() and t.shape == p.shape) for t, p in rows])
