"""Parts: on an accelerator a chain goes over some of the tensors at a time, from end to end.

Fresh memory is then that of a part, however large the model is: what a link makes waits for the
subtraction, which asks for it part by part. A large tensor is several parts where nothing on the
way looks at more than an entry. Whoever reads a list before gets all of it, as anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.engine import Group, Rule, State, updated
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.tensorlist import Operand, TensorList

PART = 2**21  # entries that go through a chain together: eight lists of them are 64 MiB


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


def pieces(tensors: Sequence[Tensor], cuts: bool, most: int = PART) -> Iterator[Piece]:
    """The pieces of tensors, of `most` entries; a larger tensor in several where it may be cut."""
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


class Parted(Lazy):
    """A list that can be computed piece by piece. Write `piece`, and `source` is what it reads."""

    __slots__ = ("source",)

    def __init__(self, source: TensorList) -> None:
        super().__init__()
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def cut(self) -> bool:
        """Whether entries can be computed by themselves."""
        raise NotImplementedError

    def piece(self, piece: Piece) -> TensorList:
        """A piece of it, computed now: once, since state may be written."""
        raise NotImplementedError

    def compute(self) -> list[Tensor]:
        return self.piece(Piece(0, len(self))).own().tensors


def cut(u: TensorList) -> bool:
    """Whether a list can be had in parts of its tensors."""
    if isinstance(u, Parted) and u.pending:
        return u.cut and cut(u.source)
    return all(map(Tensor.is_contiguous, u.tensors))


def piece_of(u: TensorList, piece: Piece) -> TensorList:
    """A piece of a list."""
    if isinstance(u, Parted) and u.pending:
        return u.piece(piece)
    return TensorList(piece.of(u.tensors), owned=u.owned)


def bottom(u: TensorList) -> TensorList:
    """The list that is there already, from which one is to be computed."""
    return bottom(u.source) if isinstance(u, Parted) and u.pending else u


class Divided(Parted):
    """A list that lies still, over an operand: a number for all, one a tensor, or slices."""

    __slots__ = ("over",)

    def __init__(self, source: TensorList, operand: Operand) -> None:
        super().__init__(source)
        self.over: Any = operand

    @property
    def cut(self) -> bool:
        return not isinstance(self.over, (list, tuple, TensorList))

    def piece(self, piece: Piece) -> TensorList:
        x = self.over
        if isinstance(x, Tensor) and not x.dim():
            return piece_of(self.source, piece).div_(x)
        return piece_of(self.source, piece).div_(x[piece.begin : piece.end])

    def statistics(self, m: Measure) -> Tensor:
        if not self.pending or isinstance(self.source, Updated):
            return super().statistics(m)
        columns: list[Tensor] = []
        parts: list[tuple[Tensor, int]] = []  # of one tensor
        whole = bottom(self).tensors
        for piece in pieces(whole, cut(self)):
            made = piece_of(self, piece).statistics(m)
            if piece.stop is None:
                columns.append(made)
                continue
            parts.append((made, piece.stop - piece.start))
            if piece.stop == whole[piece.begin].numel():
                counts = norms.numbers([n for _, n in parts], made).unsqueeze(0)
                columns.append(norms.merge(torch.stack([x for x, _ in parts], dim=2), counts, m))
                parts.clear()
        return torch.cat(columns, dim=1)


class Updated(Parted):
    """The update of a rule that takes each entry by itself; its state waits as well."""

    __slots__ = ("_done", "_group", "_rule", "_state")

    def __init__(
        self,
        source: TensorList,
        rule: Rule,
        state: State,
        group: Group,
        done: Callable[[Updated], Any],
    ) -> None:
        super().__init__(source)
        self._rule, self._state, self._group, self._done = rule, state, group, done

    @property
    def cut(self) -> bool:
        lists = [*self._state.values(), *self._group.values()]
        tensors = [t for x in lists if isinstance(x, TensorList) for t in x.tensors]
        return all(map(Tensor.is_contiguous, tensors))

    def piece(self, piece: Piece) -> TensorList:
        self._done(self)
        state = {name: self._held(held, piece) for name, held in self._state.items()}
        group = {name: _of(x, piece) for name, x in self._group.items()}
        return updated(self._rule, piece_of(self.source, piece), state, group)

    def _held(self, held: TensorList, piece: Piece) -> TensorList:
        """State of a piece; numbers of a tensor that is cut are written with its last part."""
        some = piece.of(held.tensors)
        if piece.stop is not None and not some[0].dim():
            whole = self._group["params"].tensors[piece.begin]
            if piece.stop < whole.numel():
                some = [some[0].clone()]
        return TensorList(some, owned=True)


def _of(x: Any, piece: Piece) -> Any:
    return TensorList(piece.of(x.tensors)) if isinstance(x, TensorList) else x
