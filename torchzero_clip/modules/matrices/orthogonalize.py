"""Orthogonalize: a rule that replaces a matrix with the nearest orthogonal matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, State, TensorList, TensorwiseTransform
from torchzero_clip.core.bounds import Count, NonNegative
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import LogicalMatrices, matrices_of
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.modules.matrices.batches import (
    PRODUCTS,
    apply_to_matrices,
    changed_matrices,
    in_batches,
)
from torchzero_clip.modules.matrices.newton_schulz import newton_schulz, normalized, schedule_of


class Orthogonalize(TensorwiseTransform):
    """Orthogonalization: sets all singular values of a matrix to about one, the core of Muon.

    Use it for the weight matrices inside a model, after a momentum. `EMA(nesterov=True)` and then
    `Orthogonalize` is Muon (tested against torch). Give vectors, embeddings and the output head to
    another rule, with `Partition` and `matrices_and_rest`.

    u ← U Vᵀ of u = U S Vᵀ, nearly: X ← a X + (b A + c A²) X with A = X Xᵀ, step by step

    The iteration runs in bfloat16 on a GPU and in float32 on CPU. A tensor with four or more dims
    is one matrix of shape (first, rest).

    Args:
        steps: The number of iterations. Default: None, the number that belongs to `coefficients`.
        coefficients: "quintic" (5 steps), "polar_express" (8 steps), "deepseek" (8 + 2 steps), or
            custom values. Custom values are one triple (a, b, c) for all steps, or one triple per
            step. The last triple repeats. Default: "quintic".
        eps: The rule divides a matrix by its norm, but at least by `eps`. With `eps` above 0, a
            matrix with a smaller norm gives a smaller result. Default: 0.0.
        scale: The factor of the result for a matrix of shape (A, B): "original" is √max(1, A / B),
            "match_rms_adamw" is 0.2 · √max(A, B), and None is 1. Default: None.
        layout: The matrices in fused weights and stacks. A dict maps a name or pattern, such as
            "*.qkv", to a layout: a pattern such as "(gate rows) d -> gate rows d, gate=2", or the
            result of `heads`. A function of name and tensor returns a layout or None. Without a
            layout, a tensor of four or more dims is one matrix of shape (first, rest), and a tensor
            of three dims raises an error. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Orthogonalize, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> muon = EMA(0.95, nesterov=True), Orthogonalize(scale="original")
        >>> opt = Modular(matrices, *muon, WeightDecay(0.1), LR(1e-3))

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    steps: Count | None = None
    coefficients: str | Sequence[Any] = "quintic"
    eps: NonNegative = 0.0
    scale: Literal["original", "match_rms_adamw"] | None = None
    layout: MatrixLayout = None

    reach = "tensor"
    leaves = "own"
    impure = PRODUCTS

    def check(self) -> None:
        super().check()
        try:
            schedule_of(self.coefficients, self.steps)
        except ValueError as error:
            raise ValueError(f"Orthogonalize: {error}") from None

    def operations(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        steps = len(schedule_of(self.coefficients, self.steps))
        return steps * short**2 * (4 * long + 2 * short)

    def matrices_of(self, name: str, param: Tensor) -> LogicalMatrices:
        return matrices_of(self, name, param)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return apply_to_matrices(self, buckets)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return changed_matrices(self, u, group, self._changed)

    def _changed(self, stacks: list[Tensor]) -> list[Tensor]:
        """Return the results of stacks of matrices."""
        results = in_batches(stacks, self._orthogonal)
        self._scale(results)
        return results

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Return the result of the iteration for a batch of matrices."""
        x = normalized(x, self.eps)
        if x.dtype == torch.float32 and x.device.type != "cpu":
            x = x.bfloat16()
        return newton_schulz(x, schedule_of(self.coefficients, self.steps))

    def _scale(self, pieces: list[Tensor]) -> None:
        """Multiply each piece by the factor of its shape."""
        if self.scale is None or not pieces:
            return
        shapes = [piece.shape[1:] for piece in pieces]
        if self.scale == "original":
            factors = [math.sqrt(max(1, a / max(b, 1))) for a, b in shapes]
        else:
            factors = [0.2 * math.sqrt(max(a, b)) for a, b in shapes]
        foreach("mul_", pieces, factors)
