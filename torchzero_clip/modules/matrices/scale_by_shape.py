"""ScaleByShape: a rule that scales an update by a factor of the matrix shape."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Finite
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import LogicalMatrices, matrices_of
from torchzero_clip.core.norms import numbers
from torchzero_clip.core.state import statistic_dtype


class ScaleByShape(Transform):
    """ScaleByShape scales the update of a matrix by a factor that depends on its shape.

    Put it after `Orthogonalize`. A learning rate that works for a small model then also works for
    wider models. With "sqrt_ratio", updates of all shapes have the same operator norm, if the norm
    of vectors is the root mean square.

    u ← factor · √(rows / columns) · u, or factor / columns · u

    Args:
        factor: A constant factor, any number. Default: 1.0.
        by: The factor that depends on the shape: "sqrt_ratio" for √(rows / columns), or
            "inverse_columns" for 1 / columns. Default: "sqrt_ratio".
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Orthogonalize, ScaleByShape
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> opt = Modular(matrices, EMA(0.9), Orthogonalize(), ScaleByShape(), LR(1e-2))

    Reference:
        Pethick et al., "Training deep learning models with norm-constrained LMOs", arXiv
        2502.07529.
    """

    factor: Live[Finite] = 1.0
    by: Literal["sqrt_ratio", "inverse_columns"] = "sqrt_ratio"
    layout: MatrixLayout = None

    complex = "whole"
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            bucket.apply(self, factors=self._factors(bucket))
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        factors = group["factors"]
        if isinstance(factors, Tensor):
            return u.mul_(factors * group["factor"])
        return u.mul_(TensorList([x * group["factor"] for x in factors]))

    def _factors(self, bucket: Bucket) -> Tensor | list[Tensor]:
        """Return a factor for each parameter.

        If a parameter has matrices of several shapes, there is a tensor of factors for each
        parameter.
        """
        first = bucket.originals[0]
        like = torch.empty((), dtype=statistic_dtype(first), device=first.device)
        pairs = zip(bucket.names, bucket.originals, strict=True)
        every = [matrices_of(self, name or "", p, takes_complex=True) for name, p in pairs]
        factors = [[self._factor(*size) for size in _sizes(matrices)] for matrices in every]
        if all([len(row) == 1 for row in factors]):
            return numbers([row[0] for row in factors], like)
        whole: list[Tensor] = []
        for matrices, row in zip(every, factors, strict=True):
            of_cuts = numbers(row, like)
            if len(row) == 1:
                whole.append(of_cuts.view([1] * len(matrices.shape)))
                continue
            lengths = [cut.shape[0] for cut in matrices.cuts]
            parts = [x.expand(n) for x, n in zip(of_cuts, lengths, strict=True)]
            whole.append(torch.cat(parts).view(-1, *[1] * (len(matrices.shape) - 1)))
        return bucket.parts(whole) if bucket.cohort.sharded else whole

    def _factor(self, rows: int, columns: int) -> float:
        """Return the factor for the shape of a matrix."""
        inverse_columns = 1 / max(columns, 1)
        return math.sqrt(rows * inverse_columns) if self.by == "sqrt_ratio" else inverse_columns


def _sizes(matrices: LogicalMatrices) -> list[tuple[int, int]]:
    """Return the rows and columns of the matrices: once, or for each cut if they differ."""
    sizes = [(cut.rows, cut.columns) for cut in matrices.cuts]
    return sizes[:1] if len(set(sizes)) == 1 else sizes
