"""Percentiles of magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import PIECE, as_one_operator, readable
from torchzero_clip.core.packs import in_stacks
from torchzero_clip.core.tensors import all_real

DIGIT = 16  # bits that are counted at a time


@as_one_operator
def percentile(tensors: Sequence[Tensor], p: float | Tensor) -> Tensor:
    """The p-th percentile of all magnitudes: one of them, the nearest below."""
    last = sum([t.numel() for t in tensors]) - 1
    if last > PIECE // 2 and readable(tensors[0]) and all_real(list(tensors)):
        return _counted(tensors, int(float(p) * last / 100))
    rows = [t.reshape(1, -1) for t in tensors]
    return _of_rows(torch.cat(rows, 1) if len(rows) > 1 else rows[0], p).squeeze(0)


def percentiles(tensors: Sequence[Tensor], p: float | Tensor) -> list[Tensor]:
    """The p-th percentile of the magnitudes of each tensor."""
    return in_stacks(tensors, partial(_of_rows, p=p), lambda t: percentile([t], p))


def _of_rows(stack: Tensor, p: float | Tensor) -> Tensor:
    """The p-th percentile of the magnitudes of each tensor of a stack."""
    rows = stack.flatten(1).abs()
    last = rows.shape[1] - 1
    if last < 0:
        return rows.new_zeros(len(rows))
    if isinstance(p, Tensor):  # as a number it would have to be read on the host
        index = (p * last / 100).to(rows.device).floor().long().view(1)
        return rows.sort(dim=1).values.index_select(1, index).squeeze(1)
    return rows.kthvalue(int(p * last / 100) + 1, dim=1).values


def _counted(tensors: Sequence[Tensor], rank: int) -> Tensor:
    """The magnitude of that rank, sixteen bits at a time: as integers, floats have their order."""
    double = torch.float64 in {t.dtype for t in tensors}
    dtype, whole = (torch.float64, torch.int64) if double else (torch.float32, torch.int32)
    bits, prefix = 8 * whole.itemsize, 0
    for shift in range(bits - DIGIT, -1, -DIGIT):
        counts = torch.zeros(2**DIGIT, dtype=torch.int64, device="cpu")
        for t in tensors:
            for chunk in t.reshape(-1).split(PIECE // 2):
                digits = chunk.to(dtype).abs().view(whole).bitwise_right_shift(shift)
                if shift < bits - DIGIT:
                    digits = digits[digits.bitwise_right_shift(DIGIT) == prefix]
                counts += digits.bitwise_and_(2**DIGIT - 1).bincount(minlength=2**DIGIT)
        upto = counts.cumsum(0)
        digit = int((upto <= rank).sum())
        rank -= int(upto[digit - 1]) if digit else 0
        prefix = prefix << DIGIT | digit
    return torch.tensor(prefix, dtype=whole, device="cpu").view(dtype)
