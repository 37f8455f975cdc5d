"""ClipSpectral: singular values within a limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, TensorwiseTransform
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.norms import readable
from torchzero_clip.modules.matrices.batches import PRODUCTS, in_batches, matrix_shape

NEAR = 1e-5
"""The share of the largest entry down to which eigenvectors of u uᵀ tell singular values apart: a
limit below it is reached by steps of this size."""
TIMES = 2, 4
"""The steps that matrices in float32 and in float64 take, whose smallest singular values may matter
down to the rounding of the largest. On CPU one is enough where the limit is no smaller share."""


class ClipSpectral(TensorwiseTransform):
    """u ← U min(S, max_norm) Vᵀ of u = U S Vᵀ

    U are the eigenvectors of u uᵀ in double precision, S the norms of the rows of Uᵀ u, and what is
    kept is computed: U min(1, max_norm / S) Uᵀ u. With no singular value above the limit u stays
    bit for bit.

    Args:
        max_norm: The largest singular value.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipSpectral, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> opt = Modular(matrices, Adam(), ClipSpectral(1.0), LR(1e-3))

    Reference:
        Jiang et al., "Enhancing LLM training via spectral clipping", arXiv 2603.14315.
    """

    max_norm: Live[NonNegative]
    stacks: bool | None = None

    clips = True
    impure = PRODUCTS

    def operations(self, param: Tensor) -> float:
        count, *sides = matrix_shape(self, param, self.stacks)
        short, long = sorted(sides)
        return count * short**2 * (4 * long + 9 * short)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        pieces = [t.reshape(matrix_shape(self, t, self.stacks)) for t in u]
        made = in_batches(pieces, lambda x: clipped(x, group["max_norm"]))
        rows = zip(made, u, strict=True)
        return u.copy_(TensorList([x.reshape(t.shape) for x, t in rows]))


def clipped(x: Tensor, limit: Any) -> Tensor:
    """Matrices, at least as wide as high, with singular values up to the limit."""
    if not x.numel():
        return x
    size = torch.linalg.vector_norm(x, torch.inf, dim=(1, 2), keepdim=True).double()
    bad, zero = ~torch.isfinite(size), size == 0
    scale = torch.where(bad | zero, torch.ones_like(size), size)
    y = torch.where(bad, torch.zeros_like(x), x).double() / scale
    bound = limit / scale
    near, changed = bad | zero | (bound >= NEAR), torch.zeros_like(bad)
    times = 1 if readable(near) and near.all() else TIMES[x.dtype == torch.float64]
    for left in reversed(range(times)):
        level = bound.clamp(min=NEAR) if left else bound
        u = torch.linalg.eigh(y @ y.mT).eigenvectors
        rows = u.mT @ y
        norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        over = norms > level
        share = torch.where(over, level / norms, torch.ones_like(norms))
        cut = over.any(dim=1, keepdim=True)
        unit = torch.where(bound < NEAR, torch.full_like(level, NEAR), torch.ones_like(level))
        y, changed = torch.where(cut, u @ (rows * share), y) / unit, changed | cut
        bound, scale = bound / unit, scale * unit
    made = torch.where(changed, (y * scale).to(x.dtype), x)
    return torch.where(bad, x * torch.nan, made)
