"""Exact: float32 in two halves of 16 bits. The upper half is the parameter, in bfloat16.

The upper half is rounded to the nearest bfloat16. Ties are rounded away from zero. The rest then
fits into a signed integer of 16 bits. The bits of the float32 value are the bits of the upper half
plus this integer. If a value is above the largest bfloat16, the parameter contains infinity, but
both halves together represent the finite value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest

INFINITY_BITS = 0x7F80  # the bits of infinity in bfloat16


def upper(x: Tensor) -> Tensor:
    """Return the upper halves of float32 values, in bfloat16."""
    half = ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x == x, half, torch.nan)


def lower(x: Tensor) -> Tensor:
    """Return the lower halves of float32 values, in int16."""
    bits = x.view(torch.int32)
    left = bits - ((bits + 0x8000) & -0x10000)
    return torch.where(x == x, left, 0).to(torch.int16)


def wide_of(w: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 values of both halves.

    A lower half that cannot belong to its upper half counts as zero. In this case, other code has
    written to `w` after the lower half was stored.
    """
    bits = w.view(torch.int16).to(torch.int32)
    size = w.view(torch.int16) & 0x7FFF
    too_large = (size > INFINITY_BITS) | ((size == INFINITY_BITS) & (rest > 0))
    other = too_large | ((size == 0) & (rest < 0))
    return (bits * 0x10000 + torch.where(other, 0, rest)).view(torch.float32)


class Exact(Nearest):
    """A format of float32 values that stores their lower halves next to the parameters."""

    key = "rounding/remainder"
    dtype = torch.int16
    wide = True
    begins = "the float32 weights start at the bfloat16 weights"
    ends = "the float32 weights are rounded to bfloat16"

    def widen(self, i: int, t: Tensor, at: int | None) -> Tensor:
        return wide_of(t, self._beside(i, t, at))

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        target.copy_(upper(values))
        self._beside(i, target, at).copy_(lower(values))
