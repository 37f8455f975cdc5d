"""Nearest: what torch does, which loses an update of less than half a unit in the last place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STAYED = 2**26
"""What a kernel adds up for an entry that stays, where one that moves is 1."""


class Nearest:
    """Numbers at the nearest that their dtype has; other formats say what they do otherwise.

    Args:
        beside: Tensors that are kept beside those of the list, one each.
        meter: Where to add how many entries would have moved in float32, and how many of them
            stayed.
    """

    wide = False
    """Whether links see the float32 numbers, and not those that are stored."""
    whole = False
    """Whether an update must come as a whole, where others are times a number."""

    def __init__(self, beside: Sequence[Tensor] = (), meter: Tensor | None = None) -> None:
        self.beside, self.meter = list(beside), meter

    def widen(self, i: int, t: Tensor, at: int | None) -> Tensor:
        """The float32 numbers of the i-th tensor, or of its entries from a place in its memory."""
        return t.float()

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        """Keep float32 numbers in the i-th tensor, or in such entries of it."""
        if self.meter is None:
            target.copy_(values)
            return
        before = target.clone()
        moves = values != before
        self.meter += torch.stack([moves.sum(), (moves & (target.copy_(values) == before)).sum()])

    def count(self, sums: Tensor, sizes: Sequence[int]) -> None:
        """Add what kernels have added up of tensors of these sizes; in larger ones all move."""
        assert self.meter is not None
        stay = (sums / STAYED).floor()
        large = torch.tensor([size if size > STAYED else 0 for size in sizes], device=sums.device)
        moves = torch.where(large > 0, large, sums - stay * (STAYED - 1))
        self.meter += torch.stack([moves.sum(), stay.sum()])

    def move(self, i: int, target: Tensor, at: int | None, u: Tensor, a: float, b: float) -> None:
        """w ← (1 - b) w - a u"""
        x = self.widen(i, target, at)
        x = x.mul_(1 - b) if b else x
        self.store(i, target, at, x.sub_(u, alpha=a))

    def follows(self, i: int, t: Tensor) -> bool:
        """Whether entries of a tensor like the i-th can be told by their place in its memory."""
        return not self.beside or self.beside[i].is_contiguous()

    def _beside(self, i: int, t: Tensor, at: int | None) -> Tensor:
        """What is kept beside these entries."""
        kept = self.beside[i]
        return kept if at is None else kept.view(-1)[at : at + t.numel()]
