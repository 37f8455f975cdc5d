"""Orthogonalize: the nearest matrix with orthonormal rows or columns."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, TensorwiseTransform


class Orthogonalize(TensorwiseTransform):
    """u ← U Vᵀ of u = U S Vᵀ, nearly: X ← a X + (b A + c A²) X with A = X Xᵀ, `steps` times

    After `Momentum(nesterov=True)` it is Muon. Tensors of more than two dims count as matrices of
    shape (first, rest); give vectors to another rule, with `Partition`.

    Args:
        steps: Iterations, in bfloat16; on CPU in float32, which is faster on most processors.
        coefficients: a, b and c.
        eps: The smallest norm to divide by at the start.
        scale: How the size depends on the shape (A, B): "original" multiplies by √max(1, A / B),
            "match_rms_adamw" by 0.2 · √max(A, B), None leaves singular values near one.

    Example:
        >>> muon = Momentum(0.95, nesterov=True), Orthogonalize(scale="original")
        >>> opt = Modular(matrices, *muon, WeightDecay(0.1), LR(1e-3))

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    scale: Literal["original", "match_rms_adamw"] | None = None

    def check(self) -> None:
        super().check()
        self.require("steps", at_least=1, integer=True)
        self.require("coefficients", length=3)
        self.require("eps", above=0)
        self.require_one_of("scale", (None, "original", "match_rms_adamw"))

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        if u.dim() < 2 or u.is_complex():
            raise ValueError(
                f"Orthogonalize takes real matrices, got shape {tuple(u.shape)} and {u.dtype}: "
                "give other parameters to another rule, as in Partition or a second optimizer"
            )
        matrix = u.flatten(1)
        out = orthogonal(matrix, self.steps, self.coefficients, self.eps)
        return u.zero_().add_(out.reshape(u.shape), alpha=self._size(*matrix.shape))

    def _size(self, rows: int, columns: int) -> float:
        if self.scale == "original":
            return math.sqrt(max(1, rows / max(columns, 1)))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "match_rms_adamw" else 1.0


def orthogonal(
    matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float
) -> Tensor:
    """Newton-Schulz: a polynomial that drives every singular value towards one."""
    a, b, c = coefficients
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
