"""Pieces: parts of a list of tensors. Computing piece by piece needs less memory."""

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
"""The number of elements of a piece. Eight pieces of this size in float32 need 64 MiB."""


class Piece(NamedTuple):
    """Consecutive tensors of a list, or the elements `start` to `stop` of one tensor."""

    begin: int
    end: int
    start: int = 0
    stop: int | None = None

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this piece of a list. A 0-dim tensor is not cut, so all pieces share it."""
        members = list(tensors[self.begin : self.end])
        if self.stop is None or not members or not members[0].dim():
            return members
        return [members[0].view(-1)[self.start : self.stop]]


def pieces(
    tensors: Sequence[Tensor], cuts: bool, most: int | None = None, grows: bool = True
) -> Iterator[Piece]:
    """Yield the pieces into which a list of tensors is split.

    Args:
        tensors: The tensors.
        cuts: Whether a tensor may be cut if it is larger than a piece.
        most: The largest number of elements of a piece. The default is `PIECE`.
        grows: Whether a large list has larger pieces, so that the number of pieces stays limited.
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
    """Call an elementwise function piece by piece, and return the result for the whole list.

    Intermediate results of the function need memory for only one piece.

    Args:
        function: An elementwise function that is called with a piece of `u`, of `state` and of
            `group`.
        u: The list. If `u` owns its memory, the result is written to this memory.
        state: The state. The function may write to it.
        group: The hyperparameters of the group, and other lists.
    """
    operands = [*state.values(), *group.values()]
    whole = u.tensors
    parts = list(pieces(whole, all([_can_be_cut(x, whole) for x in [u, *operands]])))
    if len(parts) == 1:
        return function(u, state, group)
    into = [torch.empty_like(t) for t in whole]
    if u.owned:
        u._unshare()  # lists that borrowed this list must keep their values
        into = whole
    for piece in parts:
        before = piece.of(whole)
        stored = {name: _state_of_piece(row, piece, whole) for name, row in state.items()}
        live = {name: of_piece(x, piece) for name, x in group.items()}
        result = function(TensorList(before, owned=u.owned), stored, live).tensors
        in_place = u.owned and all(map(operator.is_, result, before))
        if not in_place:
            foreach("copy_", piece.of(into), result)
    return TensorList(into, owned=True)


def of_piece(x: Any, piece: Piece) -> Any:
    """Return a read-only piece of a list, or of a vector with one number per tensor."""
    if isinstance(x, TensorList):
        return TensorList(piece.of(x.tensors))
    if _is_list(x) or (isinstance(x, Tensor) and x.numel() > 1):
        return x[piece.begin : piece.end]
    return x


def _state_of_piece(row: TensorList, piece: Piece, whole: Sequence[Tensor]) -> TensorList:
    """Return a piece of state.

    Scalar state of a tensor may be written only once per step. So if the tensor is cut, only its
    last piece receives the scalar itself. Its other pieces receive a copy of the scalar.
    """
    tensors = piece.of(row.tensors)
    if piece.stop is not None and not tensors[0].dim():
        is_last = piece.stop >= whole[piece.begin].numel()
        tensors = tensors if is_last else [tensors[0].clone()]
    return TensorList(tensors, owned=True)


def _is_list(x: Any) -> bool:
    """Return whether an operand is a list of tensors."""
    return isinstance(x, list) and bool(x) and isinstance(x[0], Tensor)


def _can_be_cut(x: Any, whole: Sequence[Tensor]) -> bool:
    """Return whether the tensors of `whole` can be cut if a function also receives `x`.

    They can if each tensor in `x` is 0-dim, or contiguous with the shape of the tensor in `whole`.
    An operand that is not a list of tensors never prevents cutting.
    """
    if not (isinstance(x, TensorList) or _is_list(x)):
        return True
    rows = zip(x, whole, strict=True)
    return all([not t.dim() or (t.is_contiguous() and t.shape == p.shape) for t, p in rows])
