"""Pieces: what an accelerator works on at a time, so that little of its memory is temporary."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group, State
from torchzero_clip.core.stacks import portion
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.torch_private import foreach

PIECE = 2**21
"""The elements of a piece: eight lists of so many are 64 MiB."""


class Piece(NamedTuple):
    """Some tensors of a list, or (from `start` to `stop`) elements of one of them."""

    begin: int
    end: int
    start: int = 0
    stop: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this piece of some tensors. A tensor without dims is the same in all pieces."""
        some = list(tensors[self.begin : self.end])
        if self.stop is None or not some or not some[0].dim():
            return some
        return [some[0].view(-1)[self.start : self.stop]]


def pieces(
    tensors: Sequence[Tensor], cuts: bool, most: int | None = None, grows: bool = True
) -> Iterator[Piece]:
    """Yield the pieces of tensors.

    Args:
        tensors: The tensors.
        cuts: Whether a tensor that is larger than a piece may be cut into several.
        most: The elements of a piece; `PIECE` by default.
        grows: Whether pieces of a large list are larger, so that there are not too many.
    """
    most = PIECE if most is None else most
    most = portion(tensors, most) if grows else most
    begin = 0
    total = 0
    for i, t in enumerate(tensors):
        size = t.numel()
        if begin < i and total + size > most:
            yield Piece(begin, i)
            begin = i
            total = 0
        if cuts and size > most and t.is_contiguous():
            for start in range(0, size, most):
                yield Piece(i, i + 1, start, min(start + most, size))
            begin = i + 1
            total = 0
        else:
            total += size
    if begin < len(tensors):
        yield Piece(begin, len(tensors))


def in_pieces(
    function: Callable[[TensorList, State, Group], TensorList],
    u: TensorList,
    state: State,
    group: Group,
) -> TensorList:
    """Return what a function makes of each element of a list, computed piece by piece.

    What the function computes on the way takes the memory of a piece, however large the model is.

    Args:
        function: Called with a piece of the list, of the state and of the group. Every element of
            its result depends on the elements in the same place.
        u: The list. If it is owned, its memory is the memory of the result.
        state: The state, which the function may write.
        group: The live values, and lists.
    """
    operands = [*state.values(), *group.values()]
    whole = u.tensors
    every = list(pieces(whole, all([_is_cut(x, whole) for x in [u, *operands]])))
    if len(every) == 1:
        return function(u, state, group)
    into = [torch.empty_like(t) for t in whole]
    if u.owned:
        u._unshare()  # lists that borrow this one keep their values
        into = whole
    for piece in every:
        given = piece.of(whole)
        held = {name: _held(row, piece, whole) for name, row in state.items()}
        live = {name: of_piece(x, piece) for name, x in group.items()}
        made = function(TensorList(given, owned=u.owned), held, live).tensors
        written = u.owned and all(map(operator.is_, made, given))
        if not written:
            foreach("copy_", piece.of(into), made)
    return TensorList(into, owned=True)


def of_piece(x: Any, piece: Piece) -> Any:
    """Return a piece of a list, to be read, or of a vector with a number for each tensor."""
    if isinstance(x, TensorList):
        return TensorList(piece.of(x.tensors))
    if _is_list(x) or (isinstance(x, Tensor) and x.numel() > 1):
        return x[piece.begin : piece.end]
    return x


def _held(row: TensorList, piece: Piece, whole: Sequence[Tensor]) -> TensorList:
    """Return a piece of state. The number of a tensor that is cut is written by its last piece."""
    some = piece.of(row.tensors)
    if piece.stop is not None and not some[0].dim() and piece.stop < whole[piece.begin].numel():
        some = [some[0].clone()]
    return TensorList(some, owned=True)


def _is_list(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and isinstance(x[0], Tensor)


def _is_cut(x: Any, whole: Sequence[Tensor]) -> bool:
    """Return whether an operand has an element for each of these, or a number for each tensor."""
    if not (isinstance(x, TensorList) or _is_list(x)):
        return True
    rows = zip(x, whole, strict=True)
    return all([not t.dim() or (t.is_contiguous() and t.shape == p.shape) for t, p in rows])
