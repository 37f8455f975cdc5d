"""Exact: float32 in two halves, of which the upper one is the parameter in bfloat16.

The upper half is rounded to the nearest, half away from zero, so that what is left is a whole
number of 16 bits with a sign: the bits of float32 are those of the upper half and this number. A
number above the largest of bfloat16 shows as infinity, and is finite here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest

ENDLESS = 0x7F80  # the bits of infinity in bfloat16


def upper(x: Tensor) -> Tensor:
    """The upper half of float32, in bfloat16."""
    half = ((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x == x, half, torch.nan)


def lower(x: Tensor) -> Tensor:
    """The lower half: what is left, in whole numbers."""
    bits = x.view(torch.int32)
    left = bits - ((bits + 0x8000) & -0x10000)
    return torch.where(x == x, left, 0).to(torch.int16)


def wide_of(w: Tensor, rest: Tensor) -> Tensor:
    """Float32 of both halves. A lower half that is of another number counts as none: somebody has
    written w since.
    """
    bits, size = w.view(torch.int16).to(torch.int32), w.view(torch.int16) & 0x7FFF
    other = (size > ENDLESS) | ((size == ENDLESS) & (rest > 0)) | ((size == 0) & (rest < 0))
    return (bits * 0x10000 + torch.where(other, 0, rest)).view(torch.float32)


class Exact(Nearest):
    """Float32 numbers, whose lower halves are beside the parameters."""

    key, dtype, wide = "rounding/remainder", torch.int16, True
    begins, ends = "the lower halves are zero", "the lower halves are lost"

    def widen(self, i: int, t: Tensor, at: int | None) -> Tensor:
        return wide_of(t, self._beside(i, t, at))

    def store(self, i: int, target: Tensor, at: int | None, values: Tensor) -> None:
        target.copy_(upper(values))
        self._beside(i, target, at).copy_(lower(values))
