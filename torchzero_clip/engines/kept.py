"""Kept: state in bfloat16 that a link sees in float32, in the eager engine.

`update` gets a few tensors at a time, and fused optimizers parts of them: few numbers are in
float32 at once, and they are still in the cache when they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Group, Rule, State, updated
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure, statistics
from torchzero_clip.core.stochastic import Rounding, Where
from torchzero_clip.core.tensorlist import TensorList

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

    def some(self, where: slice) -> Kept:
        """The list of some of the tensors."""
        return Kept(self.stored[where], self.rounding, self.guard, self.first + where.start)

    def in_order(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the elements of these tensors are one after another in their memory."""
        follow = self.rounding.bits.elements.follow
        return all([follow(i, t) for i, t in enumerate(tensors, self.first)])

    def forget(self) -> None:
        """Let go of what was converted."""
        self._tensors = None


def settle(state: Sequence[Kept]) -> None:
    """Round what was read of lists of the same parameters, and may have changed."""
    state = [kept for kept in state if not kept.pending]
    pairs = [(kept, kept.stored, kept.tensors) for kept in state]
    if all([kept.in_order(stored) and kept.in_order(wide) for kept, stored, wide in pairs]):
        rows = [[_vector(t) for t in row] for _, *both in pairs for row in both]
        for where, parts in batches(rows, LARGE) if rows else ():
            some = [(i + state[0].first, at) for i, at in where]
            for kept, stored, wide in zip(state, parts[::2], parts[1::2], strict=True):
                kept.rounding.store(some, stored, wide)
    else:
        for kept, stored, wide in pairs:
            for i, (target, values) in enumerate(zip(stored, wide, strict=True), kept.first):
                kept.rounding.store_whole(i, target, values)
    for kept in state:
        kept.forget()


def _vector(t: Tensor) -> Tensor:
    """The memory of a tensor without gaps."""
    return t.as_strided((t.numel(),), (1,))


def updated_by_turns(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """What `updated` gives; of state that is kept in bfloat16, few tensors are wide at a time."""
    kept = any([isinstance(held, Kept) for held in state.values()])
    if not (kept and rule.separable):
        return updated(rule, u, state, group)
    made: list[Tensor] = []
    for where in _turns(u):
        mine = {name: _some(held, where) for name, held in state.items()}
        flowing = _some(u, where)
        out = updated(rule, flowing, mine, {k: _some(x, where) for k, x in group.items()})
        made += (out if out.owned else flowing.copy_(out)).tensors
        settle([held for held in mine.values() if isinstance(held, Kept)])
    return TensorList(made, owned=True)


def _some(x: Any, where: slice) -> Any:
    """Of a list some tensors; live values are for all."""
    if isinstance(x, Kept):
        return x.some(where)
    if not isinstance(x, TensorList):
        return x
    workspace = x.workspace

    def kept() -> list[Tensor] | None:
        memory = None if workspace is None else workspace()
        return None if memory is None else memory[where]

    return TensorList(x.tensors[where], owned=x.owned, workspace=kept if workspace else None)


def _turns(u: TensorList) -> Iterator[slice]:
    """Tensors that follow each other, up to BATCH numbers; a larger one by itself."""
    begin, total = 0, 0
    for i, t in enumerate(u):
        if begin < i and total + t.numel() > BATCH:
            yield slice(begin, i)
            begin, total = i, 0
        total += t.numel()
    if len(u):
        yield slice(begin, len(u))


def batches(
    lists: list[list[Tensor]], most: int | None
) -> Iterator[tuple[Where, list[list[Tensor]]]]:
    """Some of the tensors at a time, up to BATCH numbers on CPU; a larger one in parts.

    On other devices all of them at once, or up to `most` numbers.
    """
    limit = BATCH if lists[0][0].is_cpu else most
    begin, total = 0, 0
    for i, t in enumerate(lists[0]):
        total += t.numel()
        if limit is None or total <= limit:
            continue
        if begin < i:
            yield [(j, 0) for j in range(begin, i)], [some[begin:i] for some in lists]
        begin, total = i, t.numel()
        if total > limit:
            parts = [[_cut(one, total, limit) for one in some[i : i + 1]] for some in lists]
            for j in range(-(-total // limit)):
                yield [(i, j * limit)], [[cut[j] for cut in some] for some in parts]
            begin, total = i + 1, 0
    if begin < len(lists[0]):
        rest = range(begin, len(lists[0]))
        yield [(j, 0) for j in rest], [some[begin:] for some in lists]


def _cut(t: Tensor, size: int, limit: int) -> Sequence[Tensor]:
    """The parts of a tensor; a single number goes with every part."""
    return t.view(-1).split(limit) if t.dim() else [t] * -(-size // limit)
