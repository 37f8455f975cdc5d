"""ClipSpectral: singular values within a limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, TensorwiseTransform
from torchzero_clip.modules.matrices.batches import in_batches, matrix_shape


class ClipSpectral(TensorwiseTransform):
    """u ← U min(S, max_norm) Vᵀ of u = U S Vᵀ

    S² and U are the eigenvalues and vectors of u uᵀ in double precision, and what is too much is
    taken away: U (1 - max_norm / S)₊ Uᵀ u. With no singular value above the limit u stays bit for
    bit.

    Args:
        max_norm: The largest singular value.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipSpectral, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> opt = Modular(matrices, Adam(), ClipSpectral(1.0), LR(1e-3))

    Reference:
        Jiang et al., "Enhancing LLM training via spectral clipping", arXiv 2603.14315.
    """

    max_norm: Live[float]
    stacks: bool | None = None

    def check(self) -> None:
        super().check()
        self.require("max_norm", at_least=0)

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
    size = torch.linalg.vector_norm(x, torch.inf, dim=(1, 2), keepdim=True)
    bad = ~torch.isfinite(size)
    scale = torch.where(bad | (size == 0), torch.ones_like(size), size)
    y = torch.where(bad, torch.zeros_like(x), x / scale).double()
    squares, vectors = torch.linalg.eigh(y @ y.mT)
    norms = squares.clamp(min=0).sqrt().unsqueeze(1)
    bound = (limit / scale).double()
    over = torch.where(norms > bound, 1 - bound / norms, torch.zeros_like(norms))
    less = (vectors * over) @ (vectors.mT @ y) * scale
    return torch.where(bad, x * torch.nan, x - less.to(x.dtype))
