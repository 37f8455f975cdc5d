"""Inner products of pairs of tensors, with products and sums in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.norms.numeric import as_one_operator, readable, safe_scale
from torchzero_clip.core.norms.whole import CHUNK, CHUNK_ON_ACCELERATOR, largest, totals
from torchzero_clip.core.small_tensors import copies
from torchzero_clip.core.stacks import batches, portion
from torchzero_clip.core.state import DOUBLE
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import foreach


@as_one_operator
def products(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the inner product of each pair, as a column with its real part and zero.

    Products of float64 stay in range, as norms do.
    """
    pairs = [_flat(a, b) for a, b in zip(some, others, strict=True)]
    sides = list(map(list, zip(*pairs, strict=True)))
    scales: list[Tensor] = []
    if any([t.dtype in DOUBLE for side in sides for t in side]):
        scales = [safe_scale(largest(side)) for side in sides]
        both = zip(sides, scales, strict=True)
        sides = [[t / x for t, x in zip(side, scale.unbind(), strict=True)] for side, scale in both]
    size = CHUNK if readable(sides[0][0]) else portion(some, CHUNK_ON_ACCELERATOR)
    parts = [[t.split(size) for t in side] for side in sides]
    left, right = [[x for of_tensor in side for x in of_tensor] for side in parts]
    together = batches([None] * len(left), list(map(Tensor.numel, left)), size)
    sums = [_sums([left[k] for k in batch], [right[k] for k in batch]) for batch in together]
    real = torch.cat(sums)
    if len(real) > len(pairs):
        real = torch.stack([part.sum() for part in real.split(list(map(len, parts[0])))])
    for scale in scales:
        real = real * scale
    return torch.stack([real, torch.zeros_like(real)])


def entrywise(a: Tensor, b: Tensor) -> Tensor:
    """Return the elementwise products. Their sum is the inner product."""
    if a.is_complex() or b.is_complex():
        return (a.to(torch.complex128).conj() * b).real
    return a.to(wide(a.device)) * b


def _flat(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors as vectors of real numbers, with corresponding elements."""
    if a.is_complex() or b.is_complex():
        kind = torch.promote_types(a.dtype, b.dtype)
        a, b = [torch.view_as_real(x.to(kind).resolve_conj()) for x in (a, b)]
    return a.reshape(-1), b.expand_as(a).reshape(-1)


def _sums(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """Return the inner products of some pairs."""
    dtype = wide(some[0].device)
    left, right = [x if x[0].dtype == dtype else copies(x, dtype) for x in (some, others)]
    return totals(foreach("mul", left, right))[0]
