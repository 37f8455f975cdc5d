"""Lists that are computed later: on CPU in pieces that stay in the cache.

There a step takes its time for memory, and fresh memory as large as a parameter costs more than all
arithmetic. So what treats every entry by itself, the factor of a norm rule or the update of an
elementwise link, waits until somebody reads the values. Where that is a kernel at the end of the
chain, all of it is done to a piece of every list at a time, and what lies between never leaves the
cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.norms.scratch import PIECE, SCRATCH
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import MANY, SMALL, all_plain, by_shape

if TYPE_CHECKING:
    from torchzero_clip.core.bucket import Group, State

Memory: TypeAlias = Callable[[], list[Tensor]]
Lists: TypeAlias = Sequence[TensorList]
FusedKernel: TypeAlias = Callable[..., None]
"""kernel(u, params, *state)"""
Update: TypeAlias = "Callable[[TensorList, State, Group], TensorList]"
"""What an elementwise link does."""


class Piece(NamedTuple):
    """Parts of the tensors of a list."""

    rows: list[tuple[int, int, int]]
    """(which, from, to)"""
    whole: bool
    """Whether no tensor is cut."""
    every: bool
    """Whether it is the whole list."""
    alike: bool
    """Whether it is many small tensors of one shape."""


class Later(TensorList):
    """A list that is computed when somebody reads it, or piece by piece by a kernel."""

    __slots__ = ("_owned", "_source", "_values")

    def __init__(self, source: TensorList, room: Memory | None) -> None:
        self._source = source
        self._values: list[Tensor] | None = None
        self._owned, self.room, self.norms, self.whole = True, room, None, None

    def __len__(self) -> int:
        return len(self._source)

    @property
    def waits(self) -> bool:
        """Whether nothing is computed yet."""
        return self._values is None

    @property
    def tensors(self) -> list[Tensor]:
        """The values, computed when somebody first reads them."""
        if self._values is None:
            self._values = self._compute()
        return self._values

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._values = list(values)

    @property
    def owned(self) -> bool:
        self._settle()
        return self._owned

    @owned.setter
    def owned(self, value: bool) -> None:
        self._owned = value

    @property
    def _origin(self) -> list[Tensor]:
        return self._source._origin if self._values is None else self._values

    @property
    def dtype(self) -> torch.dtype:
        return self._origin[0].dtype

    def to(self, dtype: torch.dtype) -> TensorList:
        return self if self.dtype == dtype else super().to(dtype)

    def _compute(self) -> list[Tensor]:
        """All values, in memory."""
        raise NotImplementedError

    def part(self, piece: Piece, memory: Memory | None = None) -> TensorList:
        """The values of a piece; what must be written goes into this memory, or into scratch."""
        raise NotImplementedError

    def _at_once(self) -> int:
        """How many numbers a piece has."""
        return PIECE

    def done(self) -> None:
        """All pieces are computed, and the values used up or in their place."""
        if isinstance(self._source, Later) and self._source.waits:
            self._values = []
            self._source.done()

    def run(self, kernel: FusedKernel, params: list[Tensor], state: Lists, divides: bool) -> None:
        """kernel(values, params, *state), piece by piece while the values are not computed."""
        if self._values is not None:
            _run(kernel, self._values, params, state)
            return
        for piece in pieces(self._origin, self._at_once()):
            _run_piece(kernel, self.part(piece), parts(params, piece), _cut(state, piece), piece)
        self.done()


class Scaled(Later):
    """A list times, divided by or less numbers; `stays` where it must go into its source."""

    __slots__ = ("_numbers", "_rows", "stays")

    def __init__(
        self, source: TensorList, rows: Sequence[tuple[str, list[float]]], stays: bool = False
    ) -> None:
        super().__init__(source, None)
        self._rows = rows  # ("mul", "div" or "sub", one number a tensor), once or twice
        self._owned, self.stays = not stays, stays
        self._numbers: dict[float, Tensor] = {}

    def _compute(self) -> list[Tensor]:
        out = self._source
        for name, row in self._rows:
            same = len(set(row)) == 1
            each = torch.tensor(row, dtype=self.dtype, device="cpu")
            out = out._write(name, row[0] if same else each.unbind())
        return out.tensors

    def _number(self, x: float) -> Tensor:
        """A number as torch takes it fastest: many pieces share it."""
        if x not in self._numbers:
            self._numbers[x] = torch.tensor(x, dtype=self.dtype, device="cpu")
        return self._numbers[x]

    def memory(self) -> list[Tensor]:
        """The source, divided: where it stays, whatever has become of the values since."""
        self._settle()
        return self._source.tensors

    @property
    def divisor(self) -> float | None:
        """What all tensors are still to be divided by, if it is one number."""
        (name, row), *more = self._rows
        if more or not self.waits or len(set(row)) > 1:
            return None
        if name == "div":
            return row[0]
        return (1 / row[0] if row[0] else math.inf) if name == "mul" else None

    def part(self, piece: Piece, memory: Memory | None = None) -> TensorList:
        u = part_of(self._source, piece, memory)
        if self.stays:
            u = TensorList(u.tensors, owned=True)
        for name, row in self._rows:
            each = [row[i] for i, _, _ in piece.rows]
            if each.count(0 if name == "sub" else 1) < len(each):
                u = u._write(name, self._number(each[0]) if len(set(each)) == 1 else each)
        return borrowed(u.tensors, piece, memory) if self.stays else u

    def done(self) -> None:
        super().done()
        if self.waits and (self.stays or self._source.owned):  # it went where it came from
            self._values = self._source.tensors

    def run(self, kernel: FusedKernel, params: list[Tensor], state: Lists, divides: bool) -> None:
        divides = divides and self.stays and self.dtype == torch.float32
        if divides and self.divisor is not None:
            scale = torch.tensor(self.divisor, dtype=torch.float32, device="cpu")
            lists = [some.tensors for some in state]
            kernel(self._source.tensors, params, *lists, grad_scale=scale)
            self.done()
        else:
            super().run(kernel, params, state, divides)


class InPieces(Later):
    """What an elementwise link makes of a list."""

    __slots__ = ("_group", "_numbers", "_state", "_update")

    def __init__(
        self, source: TensorList, update: Update, state: State, group: Group, room: Memory | None
    ) -> None:
        super().__init__(source, room)
        self._update, self._state, self._group = update, state, group
        self._numbers: dict[tuple[str, int], Tensor] = {}  # of tensors that are cut, as they were

    def _compute(self) -> list[Tensor]:
        memory = cache(partial(memory_of, self._source, self.room))
        returned: str | None = None
        for piece in pieces(self._origin, self._at_once()):
            out, returned = self._made(piece, memory)
            if returned is None:
                _land(out.tensors, parts(memory(), piece))
        self.done()
        self._owned = returned is None
        if returned is None:
            return memory()
        source = self._source
        if self.room is None and not isinstance(source, Later) and source.owned:
            self.room = memory  # nobody looks there any more
        return self._state[returned].tensors

    def part(self, piece: Piece, memory: Memory | None = None) -> TensorList:
        out, returned = self._made(piece, memory)
        return out if returned is None else borrowed(out.tensors, piece, memory)

    def _at_once(self) -> int:
        return PIECE // 2  # what an update makes on the way needs room as well

    def done(self) -> None:
        super().done()
        self._values = []

    def _made(self, piece: Piece, memory: Memory | None) -> tuple[TensorList, str | None]:
        """What the link makes of a piece, and which of its state that is, if any."""
        u = part_of(self._source, piece, memory)
        u = u.own() if piece.alike and memory is None else u
        state, group = dict(self._state), dict(self._group)
        if not piece.every:
            state = {name: self._cut(name, piece) for name in state}
            lists = {name: x for name, x in group.items() if isinstance(x, TensorList)}
            group |= {name: Cut(some, piece) for name, some in lists.items()}
        handles = dict(state)
        out = self._update(u, state, group)
        return out, next((name for name, handle in handles.items() if out is handle), None)

    def _cut(self, name: str, piece: Piece) -> TensorList:
        """State for a piece. A number changes once, though its tensor comes in several parts."""
        some = cut(self._state[name], piece)
        if piece.whole or not _numbers(some.tensors):
            return some
        for k, (i, begin, end) in enumerate(piece.rows):
            if begin == 0 and end < self._origin[i].numel():
                self._numbers[name, i] = some.tensors[k].clone()
            elif begin:
                some.tensors[k] = self._numbers[name, i].clone()
        return some


class Waiting(TensorList):
    """The memory that a pending division goes into: divided when somebody reads it."""

    __slots__ = ("_division", "_own")

    def __init__(self, division: Scaled) -> None:
        self._division, self._own = division, list[Tensor]()
        self.owned, self.room, self.norms, self.whole = False, None, None, None

    def __len__(self) -> int:
        return len(self._division)

    @property
    def tensors(self) -> list[Tensor]:
        return self._own or self._division.memory()

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._own = list(values)

    def borrow(self) -> TensorList:
        return TensorList(self._own) if self._own else Waiting(self._division)


class Cut(TensorList):
    """A piece of a list, cut when somebody reads it."""

    __slots__ = ("_list", "_own", "_piece")

    def __init__(self, uncut: TensorList, piece: Piece) -> None:
        self._list, self._piece, self._own = uncut, piece, list[Tensor]()
        self.owned, self.room, self.norms, self.whole = False, None, None, None

    def __len__(self) -> int:
        return len(self._piece.rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The parts."""
        if not self._own:
            self._own = parts(self._list.tensors, self._piece)
        return self._own

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._own = list(values)


# ---------------------------------------------------------------------- pieces of lists


def can_be_cut(u: TensorList, state: State, params: TensorList) -> bool:
    """Whether entries of these lists lie in the same order: plain, contiguous, on CPU."""
    example = params.tensors[0]
    if torch.compiler.is_compiling() or example.device.type != "cpu" or example.is_complex():
        return False
    origin = u._origin
    held = [some.tensors for some in state.values()]
    lists = [params.tensors, origin, *held]
    if not all([all_plain(some) and all(map(Tensor.is_contiguous, some)) for some in lists]):
        return False
    entries = [some for some in held if not _numbers(some)]
    sizes = list(map(Tensor.numel, origin)) if entries else []
    return all([list(map(Tensor.numel, some)) == sizes for some in entries])


def _numbers(tensors: Sequence[Tensor]) -> bool:
    return not any(map(Tensor.dim, tensors))


def run_kernel(
    u: TensorList,
    kernel: FusedKernel,
    params: list[Tensor],
    state: Lists = (),
    divides: bool = False,
) -> None:
    """kernel(u, params, *state) of contiguous tensors.

    `divides` says that it takes a `grad_scale`, and writes what it has divided.
    """
    if isinstance(u, Later):
        u.run(kernel, params, state, divides)
    else:
        _run(kernel, u.tensors, params, state)


def _run(kernel: FusedKernel, u: list[Tensor], params: list[Tensor], state: Lists) -> None:
    """All at once, but for many small tensors of one shape."""
    if not state or u[0].device.type != "cpu":
        kernel(u, params, *[some.tensors for some in state])
        return
    for piece in _pieces(u, sys.maxsize):
        some = TensorList(parts(u, piece))
        _run_piece(kernel, some, parts(params, piece), _cut(state, piece), piece)


def _run_piece(
    kernel: FusedKernel, u: TensorList, params: list[Tensor], state: Lists, piece: Piece
) -> None:
    """kernel(u, params, *state): once for many small tensors, where their state has one memory.

    Their parameters are stacked for it in scratch memory, and go back.
    """
    wholes = [_as_one(some) for some in state] if piece.alike else []
    known = [whole for whole in wholes if whole is not None]
    if not state or len(known) < len(state):
        kernel(u.tensors, params, *[some.tensors for some in state])
        return
    rows = SCRATCH.rows(params, beside=True)
    torch.stack(params, out=rows.whole)
    whole = u.whole if u.whole is not None else SCRATCH.stack(u.tensors)
    kernel([whole], [rows.whole], *known)
    torch._foreach_copy_(params, rows)


def _as_one(some: TensorList) -> list[Tensor] | None:
    """The tensor whose rows these are, or the number that all of them are, or nothing at all."""
    tensors = some.tensors
    if not tensors or all([t is tensors[0] for t in tensors]):
        return tensors[:1]
    whole = some._joined() if tensors[0].dim() else None
    return None if whole is None else [whole]


def _cut(state: Lists, piece: Piece) -> list[TensorList]:
    return [cut(some, piece) for some in state]


def cut(some: TensorList, piece: Piece) -> TensorList:
    """A piece of a list that may be written."""
    out = TensorList(parts(some.tensors, piece), owned=True)
    if some.whole is not None and piece.whole:
        first, last = piece.rows[0][0], piece.rows[-1][0]
        together = len(some) and last - first + 1 == len(out)
        out.whole = some.whole[first : last + 1] if together else None
    return out


def pieces(tensors: Sequence[Tensor], most: int) -> Iterator[Piece]:
    """All of some tensors, in pieces of `most` numbers."""
    for piece in _pieces(tensors, most):
        SCRATCH.piece = piece
        yield piece
    SCRATCH.piece = None


def _pieces(tensors: Sequence[Tensor], most: int) -> Iterator[Piece]:
    """First small tensors, many of one shape together, then the large ones, cut."""
    small: list[int] = []
    large: list[int] = []
    for shape, where in by_shape(tensors).items():
        n = shape.numel()
        if n > SMALL:
            large += where
        elif len(where) < MANY:
            small += where
        else:
            many = PIECE // max(n, 1)
            for begin in range(0, len(where), many):
                rows = [(i, 0, n) for i in where[begin : begin + many]]
                yield Piece(rows, True, len(rows) == len(tensors), len(rows) >= MANY)
    if small:
        rows = [(i, 0, tensors[i].numel()) for i in sorted(small)]
        yield Piece(rows, True, len(rows) == len(tensors), False)
    yield from _cut_large(tensors, sorted(large), most)


def _cut_large(tensors: Sequence[Tensor], where: list[int], most: int) -> Iterator[Piece]:
    rows: list[tuple[int, int, int]] = []
    free, whole = most, True
    for i in where:
        n = tensors[i].numel()
        for begin in range(0, n, most):
            end = min(begin + most, n)
            if end - begin > free:
                yield Piece(rows, whole, False, False)
                rows, free, whole = [], most, True
            rows.append((i, begin, end))
            free -= end - begin
            whole = whole and end - begin == n
    if rows:
        yield Piece(rows, whole, whole and len(rows) == len(tensors), False)


def parts(tensors: list[Tensor], piece: Piece) -> list[Tensor]:
    """Of tensors what belongs to a piece; numbers go as they are."""
    if piece.every or not tensors:
        return tensors
    if piece.whole:
        return [tensors[i] for i, _, _ in piece.rows]
    return [
        t
        if t.dim() == 0 or end - begin == t.numel()
        else t.as_strided((end - begin,), (1,), t.storage_offset() + begin)
        for t, begin, end in [(tensors[i], begin, end) for i, begin, end in piece.rows]
    ]


def part_of(u: TensorList, piece: Piece, memory: Memory | None) -> TensorList:
    """A piece of a list; if it must be written elsewhere, then into this memory or scratch."""
    if isinstance(u, Later) and u.waits:
        return u.part(piece, memory)
    if u.owned:
        return TensorList(parts(u.tensors, piece), owned=True)
    return borrowed(parts(u.tensors, piece), piece, memory)


def borrowed(tensors: list[Tensor], piece: Piece, memory: Memory | None) -> TensorList:
    """A piece that is written elsewhere: small tensors of many shapes are worth no memory kept."""
    if memory is not None:
        return TensorList(tensors, room=lambda: parts(memory(), piece))
    if tensors[0].numel() > SMALL or not piece.whole:
        return TensorList(tensors, room=partial(SCRATCH.like, tensors))
    return TensorList(tensors, room=partial(SCRATCH.rows, tensors) if piece.alike else None)


def memory_of(u: TensorList, room: Memory | None) -> list[Tensor]:
    """Where what is made of a list may go: its own memory, or what is kept for it, or new."""
    while isinstance(u, Later) and u.waits:
        stays = isinstance(u, Scaled) and u.stays
        u, room = (TensorList(u._origin), u.room) if stays else (u._source, u.room or room)
    if u.owned:
        return u.tensors
    kept = u.room or room
    fits = kept() if kept is not None else []
    if fits and fits[0].dtype == u.dtype:
        return fits
    return [torch.empty_like(t) for t in u.tensors]


def _land(values: list[Tensor], memory: list[Tensor]) -> None:
    """Put values where they belong, unless they are there."""
    rows = zip(values, memory, strict=True)
    rest = [(t, m) for t, m in rows if t is not m and t.data_ptr() != m.data_ptr()]
    if rest:
        torch._foreach_copy_([m for _, m in rest], [t for t, _ in rest])
