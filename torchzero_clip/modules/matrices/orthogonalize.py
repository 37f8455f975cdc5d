"""Orthogonalize: the nearest matrix with orthonormal rows or columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, State, TensorList, TensorwiseTransform
from torchzero_clip.core.bounds import Count, NonNegative
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.modules.matrices.batches import PRODUCTS, in_batches, matrix_shape
from torchzero_clip.modules.matrices.blocks import Blocks, block_rows, check_blocks, joined
from torchzero_clip.modules.matrices.newton_schulz import newton_schulz, normalized, schedule_of


class Orthogonalize(TensorwiseTransform):
    """u ← U Vᵀ of u = U S Vᵀ, nearly: X ← a X + (b A + c A²) X with A = X Xᵀ, step by step

    After `EMA(nesterov=True)` it is Muon (tested against torch). Tensors of four and more dims
    count as matrices of shape (first, rest); give vectors to another rule, with `Partition`.

    Args:
        steps: Iterations, in bfloat16, on CPU in float32; None takes those of the coefficients.
        coefficients: "quintic" (5 steps), "polar_express" (8), "deepseek" (8 + 2), or a, b and c of
            your own, one triple for all steps or one for each, of which the last repeats.
        eps: The smallest norm to divide by. Above 0 smaller matrices give smaller results.
        scale: How the size depends on the shape (A, B): "original" multiplies by √max(1, A / B),
            "match_rms_adamw" by 0.2 · √max(A, B), None leaves singular values near one.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, each block by itself: for a name or regular expression
            how many equal blocks, or the rows of each; or a function of name and tensor.

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
    stacks: bool | None = None
    blocks: Blocks = None

    reach = "tensor"
    leaves = "own"
    impure = PRODUCTS

    def check(self) -> None:
        super().check()
        try:
            schedule_of(self.coefficients, self.steps)
        except ValueError as error:
            raise ValueError(f"Orthogonalize: {error}") from None
        check_blocks(self)

    def operations(self, param: Tensor) -> float:
        count, *sides = matrix_shape(self, param, self.stacks)
        short, long = sorted(sides)
        steps = len(schedule_of(self.coefficients, self.steps))
        return steps * count * short**2 * (4 * long + 2 * short)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            pairs = zip(bucket.names, bucket.originals, strict=True)
            bucket.apply(self, rows=[self._rows(name or "", p) for name, p in pairs])
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        rows = group.get("rows", [self._rows("", t) for t in u])
        cut = [self._cut(*pair) for pair in zip(u, rows, strict=True)]
        pieces = in_batches([piece for some in cut for piece in some], self._orthogonal)
        self._size(pieces)
        left = iter(pieces)
        made = [joined([next(left) for _ in some]) for some in cut]
        shaped = [x.reshape(t.shape) for x, t in zip(made, u, strict=True)]
        return u.copy_(TensorList(shaped))

    def _rows(self, name: str, param: Tensor) -> list[int]:
        """The rows of each block of the matrices of a parameter."""
        return block_rows(self, name, param, matrix_shape(self, param, self.stacks)[1])

    def _cut(self, t: Tensor, rows: list[int]) -> Sequence[Tensor]:
        """The blocks of the matrices of a tensor."""
        return t.reshape(matrix_shape(self, t, self.stacks)).split(rows, dim=1)

    def _orthogonal(self, x: Tensor) -> Tensor:
        x = normalized(x, self.eps)
        if x.dtype == torch.float32 and x.device.type != "cpu":
            x = x.bfloat16()
        return newton_schulz(x, schedule_of(self.coefficients, self.steps))

    def _size(self, pieces: list[Tensor]) -> None:
        """Multiply each by the factor of its shape."""
        shapes = [piece.shape[1:] for piece in pieces]
        if self.scale == "original":
            sizes = [math.sqrt(max(1, a / max(b, 1))) for a, b in shapes]
        else:
            sizes = [0.2 * math.sqrt(max(a, b)) for a, b in shapes]
        if self.scale is not None and pieces:
            foreach("mul_", pieces, sizes)
