"""Orthogonalize: a rule that replaces a matrix with the nearest orthogonal matrix."""

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
        stacks: How to treat a tensor with three dims. True means a stack of matrices. False means
            one matrix of shape (first, rest). None raises an error. With four or more dims, a
            tensor is one matrix of shape (first, rest), and True raises an error. Default: None.
        blocks: The blocks of rows of fused matrices, such as the heads of a fused QKV weight. The
            rule orthogonalizes each block separately. A dict maps a name or regular expression to a
            number of equal blocks, or to the rows of each block. A function of name and tensor
            returns a number of blocks, the rows of each block, or None. Default: None, no blocks.

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
        blocks = [self._cut(*pair) for pair in zip(u, rows, strict=True)]
        pieces = in_batches([piece for pieces in blocks for piece in pieces], self._orthogonal)
        self._scale(pieces)
        remaining = iter(pieces)
        matrices = [joined([next(remaining) for _ in pieces]) for pieces in blocks]
        return u.copy_(TensorList([x.reshape(t.shape) for x, t in zip(matrices, u, strict=True)]))

    def _rows(self, name: str, param: Tensor) -> list[int]:
        """Return the number of rows of each block, for the matrices of a parameter."""
        return block_rows(self, name, param, matrix_shape(self, param, self.stacks)[1])

    def _cut(self, t: Tensor, rows: list[int]) -> Sequence[Tensor]:
        """Return the blocks of the matrices of a tensor."""
        return t.reshape(matrix_shape(self, t, self.stacks)).split(rows, dim=1)

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
