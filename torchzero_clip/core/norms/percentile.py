"""Percentiles of the absolute values of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import PIECE, as_one_operator, readable
from torchzero_clip.core.sharding.collectives import sum_
from torchzero_clip.core.small_tensors import in_stacks
from torchzero_clip.core.tensor_kinds import all_real

DIGIT = 16  # bits that are counted at a time


@as_one_operator
def percentile(tensors: Sequence[Tensor], p: float | Tensor) -> Tensor:
    """Return the p-th percentile of all absolute values, rounded down to one of the values."""
    last = sum([t.numel() for t in tensors]) - 1
    if last > PIECE // 2 and readable(tensors[0]) and all_real(list(tensors)):
        return _counted(tensors, int(float(p) * last / 100))
    rows = [t.reshape(1, -1) for t in tensors]
    return _of_rows(torch.cat(rows, 1) if len(rows) > 1 else rows[0], p).squeeze(0)


def percentiles(tensors: Sequence[Tensor], p: float | Tensor) -> list[Tensor]:
    """Return the p-th percentile of the absolute values of each tensor."""
    return in_stacks(tensors, partial(_of_rows, p=p), lambda t: percentile([t], p))


def percentiles_of_ranks(
    tensors: Sequence[Tensor], shares: Sequence[float | Tensor], group: Any
) -> Tensor:
    """Return percentiles of the absolute values on all ranks of a process group, one per share.

    A rank does not know how many values the other ranks have. So each rank counts how often each
    digit of 16 bits occurs, and the ranks add up their counts. This is possible because the bits of
    non-negative floats, read as integers, have the same order as the floats.
    """
    bits = torch.cat([t.reshape(-1).abs().double() for t in tensors]).view(torch.int64)
    size = torch.full((1,), bits.numel(), dtype=torch.int64, device=bits.device)
    last = sum_(size, group).double() - 1
    ranks = torch.cat([share * last / 100 for share in shares]).floor().long().clamp(min=0)
    prefixes = torch.zeros_like(ranks)  # the digits that are already known, for each share
    for shift in range(64 - DIGIT, -1, -DIGIT):
        digits = bits.bitwise_right_shift(shift).bitwise_and(2**DIGIT - 1)
        above = bits.bitwise_right_shift(shift).bitwise_right_shift(DIGIT)
        inside = above == prefixes.unsqueeze(1)  # the values that begin with the known digits
        counts = torch.zeros(len(ranks), 2**DIGIT, dtype=torch.int64, device=bits.device)
        counts = counts.index_add(1, digits, inside.long())
        upto = sum_(counts, group).cumsum(1)
        digit = (upto <= ranks.unsqueeze(1)).sum(1, keepdim=True).clamp(max=2**DIGIT - 1)
        below = upto.gather(1, (digit - 1).clamp(min=0)).where(digit > 0, 0)
        ranks = ranks - below.squeeze(1)
        prefixes = prefixes.bitwise_left_shift(DIGIT) + digit.squeeze(1)
    return prefixes.view(torch.float64)


def _of_rows(stack: Tensor, p: float | Tensor) -> Tensor:
    """Return the p-th percentile of the absolute values of each tensor of a stack."""
    rows = stack.flatten(1).abs()
    last = rows.shape[1] - 1
    if last < 0:
        return rows.new_zeros(len(rows))
    if isinstance(p, Tensor):  # to make it a number would synchronize with the device
        index = (p * last / 100).to(rows.device).floor().long().view(1)
        return rows.sort(dim=1).values.index_select(1, index).squeeze(1)
    return rows.kthvalue(int(p * last / 100) + 1, dim=1).values


def _counted(tensors: Sequence[Tensor], rank: int) -> Tensor:
    """Return the absolute value at position `rank` in ascending order, from 0.

    It is found by counting digits of 16 bits. This is possible because the bits of non-negative
    floats, read as integers, have the same order as the floats.
    """
    double = torch.float64 in {t.dtype for t in tensors}
    dtype, whole = (torch.float64, torch.int64) if double else (torch.float32, torch.int32)
    bits = 8 * whole.itemsize
    prefix = 0
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
