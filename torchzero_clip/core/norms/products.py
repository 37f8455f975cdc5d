"""Inner products of pairs of tensors, with products and sums in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import as_one_operator, readable, safe_scale
from torchzero_clip.core.norms.whole import CHUNK, CHUNK_ON_ACCELERATOR, largest, totals
from torchzero_clip.core.small_tensors import copies, shares
from torchzero_clip.core.stacks import batches, portion
from torchzero_clip.core.state import DOUBLE
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import foreach

Factors = tuple[Tensor, Tensor, Sequence[Tensor]]
"""Two vectors, and the scales that divide the vectors: one scale per vector, or no scales."""


@as_one_operator
def products(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each pair, as a column with its real part and zero.

    Products of float64 stay in range, as norms do.
    """
    pairs = [_flat(a, b) for a, b in zip(some, others, strict=True)]
    scales: list[Tensor] = []
    if any([a.dtype in DOUBLE or b.dtype in DOUBLE for a, b in pairs]):
        scales = [safe_scale(largest(list(side))) for side in zip(*pairs, strict=True)]
    scales_of = [scale.unbind() for scale in scales]
    size = CHUNK if readable(pairs[0][0]) else portion(some, CHUNK_ON_ACCELERATOR)
    rows: list[Factors] = []
    lengths: list[int] = []
    for i, (a, b) in enumerate(pairs):
        parts = list(zip(a.split(size), b.split(size), strict=True))
        rows += [(x, y, [column[i] for column in scales_of]) for x, y in parts]
        lengths.append(len(parts))
    together = batches([None] * len(rows), [a.numel() for a, _, _ in rows], size)
    real = torch.cat([_sums([rows[k] for k in batch]) for batch in together])
    if max(lengths) > 1:
        real = torch.stack([part.sum() for part in real.split(lengths)])
    for scale in scales:
        real = real * scale
    return torch.stack([real, torch.zeros_like(real)])


def entrywise(a: Tensor, b: Tensor) -> Tensor:
    """Return the elementwise products. Their sum is the inner product."""
    if a.is_complex() or b.is_complex():
        return (a.to(torch.complex128).conj() * b).real
    return _product(a, b, ())


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors as vectors of real numbers, with corresponding elements."""
    if a.is_complex() or b.is_complex():
        kind = torch.promote_types(a.dtype, b.dtype)
        a, b = [torch.view_as_real(x.to(kind).resolve_conj()) for x in (a, b)]
    return a.reshape(-1), b.expand_as(a).reshape(-1)


def _sums(rows: Sequence[Factors]) -> Tensor:
    """Return the inner products of some pairs."""
    some, others, scales = map(list, zip(*rows, strict=True))
    if not shares(some):
        return totals([_product(*row) for row in rows])[0]
    left = copies(some, wide(some[0].device))
    right = copies(others, wide(some[0].device))
    if scales[0]:
        foreach("div_", left, [scale for scale, _ in scales])
        foreach("div_", right, [scale for _, scale in scales])
    foreach("mul_", left, right)
    return totals(left)[0]


def _product(a: Tensor, b: Tensor, scales: Sequence[Tensor]) -> Tensor:
    a = a.to(wide(a.device))
    return (a / scales[0]) * (b.to(a.dtype) / scales[1]) if scales else a * b
