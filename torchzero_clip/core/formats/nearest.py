"""Nearest: torch's own rounding, which loses an update of less than half an ULP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STAYED = 2**26
"""The number that a kernel adds to its sum for an element that stays the same.

For an element that changes, the kernel adds 1.
"""


class Nearest:
    """The format that rounds to the nearest value of the stored dtype.

    It is also the base class of other formats.

    Args:
        beside: Tensors that are stored next to the tensors of the list, one for each.
        meter: A tensor with two counts. The first counts the elements that would have changed in
            float32. The second counts the elements among them that stayed the same.
    """

    wide = False
    """Whether links see the float32 values instead of the stored values."""
    whole = False
    """Whether `move` needs the finished update, with the factor 1 and without a decay."""

    def __init__(self, beside: Sequence[Tensor] = (), meter: Tensor | None = None) -> None:
        self.beside = list(beside)
        self.meter = meter

    def widen(self, i: int, t: Tensor, at: int | None) -> Tensor:
        """Return the float32 values of the i-th tensor.

        If `at` is given, `t` is the part of that tensor that begins at this position of its memory.
        """
        return t.float()

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        """Store float32 values in the i-th tensor, or in the part that begins at `at`."""
        if self.meter is None:
            target.copy_(values)
            return
        before = target.clone()
        moves = values != before
        self.meter += torch.stack([moves.sum(), (moves & (target.copy_(values) == before)).sum()])

    def count(self, sums: Tensor, sizes: Sequence[int]) -> None:
        """Add the sums of kernels to the meter. Each kernel has processed a tensor of this size.

        For a tensor with more than `STAYED` elements, a sum does not determine both counts. All
        elements of such a tensor count as elements that would have changed.
        """
        assert self.meter is not None
        stay = (sums / STAYED).floor()
        large = torch.tensor([size if size > STAYED else 0 for size in sizes], device=sums.device)
        moves = torch.where(large > 0, large, sums - stay * (STAYED - 1))
        self.meter += torch.stack([moves.sum(), stay.sum()])

    def move(self, i: int, target: Tensor, at: int | None, u: Tensor, a: float, b: float) -> None:
        """Compute w ← (1 - b) w - a u for the i-th tensor, or for the part that begins at `at`."""
        x = self.widen(i, target, at)
        x = x.mul_(1 - b) if b else x
        self.store(i, target, at, x.sub_(u, alpha=a))

    def follows(self, i: int, t: Tensor) -> bool:
        """Return whether `at` is enough to find a part of the i-th tensor."""
        return not self.beside or self.beside[i].is_contiguous()

    def _beside(self, i: int, t: Tensor, at: int | None) -> Tensor:
        """Return the elements that are stored next to the elements of `t`."""
        stored = self.beside[i]
        return stored if at is None else stored.view(-1)[at : at + t.numel()]
