"""Inner products of pairs of tensors: products and sums in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import as_one_operator, readable, safe_scale
from torchzero_clip.core.norms.whole import CHUNK, MOST, largest, totals
from torchzero_clip.core.small_tensors import copies, shares
from torchzero_clip.core.stacks import batches, portion
from torchzero_clip.core.state import DOUBLE
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import foreach

Factors = tuple[Tensor, Tensor, Sequence[Tensor]]


@as_one_operator
def products(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The inner product of each pair, a column each in the form of sums: of complex ones its real
    part. Products of float64 stay in range, as norms do.
    """
    pairs = [_flat(a, b) for a, b in zip(some, others, strict=True)]
    double = any([a.dtype in DOUBLE or b.dtype in DOUBLE for a, b in pairs])
    scales = [safe_scale(largest(list(row))) for row in zip(*pairs, strict=True)] if double else []
    size = CHUNK if readable(pairs[0][0]) else portion(some, MOST)
    parts = [list(zip(a.split(size), b.split(size), strict=True)) for a, b in pairs]
    lengths, columns = [len(row) for row in parts], [scale.unbind() for scale in scales]
    by = zip(parts, zip(*columns, strict=True) if columns else [()] * len(parts), strict=True)
    rows = [(a, b, scale) for row, scale in by for a, b in row]
    together = batches([None] * len(rows), [a.numel() for a, _, _ in rows], size)
    every = real = torch.cat([_sums([rows[k] for k in some]) for some in together])
    if max(lengths) > 1:
        real = torch.stack([part.sum() for part in every.split(lengths)])
    for scale in scales:
        real = real * scale
    return torch.stack([real, torch.zeros_like(real)])


def entrywise(a: Tensor, b: Tensor) -> Tensor:
    """The products of entries, whose sums are inner products."""
    if a.is_complex() or b.is_complex():
        return (a.to(torch.complex128).conj() * b).real
    return _product(a, b, ())


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors as vectors of real numbers, entry beside entry."""
    if a.is_complex() or b.is_complex():
        kind = torch.promote_types(a.dtype, b.dtype)
        a, b = [torch.view_as_real(x.to(kind).resolve_conj()) for x in (a, b)]
    return a.reshape(-1), b.expand_as(a).reshape(-1)


def _sums(rows: Sequence[Factors]) -> Tensor:
    """The inner products of some pairs."""
    some, others, scales = map(list, zip(*rows, strict=True))
    if not shares(some):
        return totals([_product(*row) for row in rows])[0]
    made, right = [copies(x, wide(some[0].device)) for x in (some, others)]
    for side, by in zip((made, right), zip(*scales, strict=True), strict=False):
        foreach("div_", side, list(by))
    foreach("mul_", made, right)
    return totals(made)[0]


def _product(a: Tensor, b: Tensor, scales: Sequence[Tensor]) -> Tensor:
    a = a.to(wide(a.device))
    return (a / scales[0]) * (b.to(a.dtype) / scales[1]) if scales else a * b
