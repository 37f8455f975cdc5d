"""ScaleByShape: the size of a step by the shape of its matrix."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform
from torchzero_clip.core.norms import numbers
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.modules.matrices.batches import check_shape, row_dims


class ScaleByShape(Transform):
    """u ← factor · √(rows / columns) · u, or factor / columns · u

    After `Orthogonalize` it makes the norm that a matrix has as a map between vectors of mean
    square one the same whatever its shape, so that a learning rate serves wider models as well.

    Args:
        factor: Any number.
        by: "sqrt_ratio" is √(rows / columns), "inverse_columns" is 1 / columns.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.

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

    factor: Live[float] = 1.0
    by: Literal["sqrt_ratio", "inverse_columns"] = "sqrt_ratio"
    stacks: bool | None = None

    complex = "whole"
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            first = bucket.originals[0]
            like = torch.empty((), dtype=statistic_dtype(first), device=first.device)
            bucket.apply(self, factors=numbers(list(map(self._factor, bucket.originals)), like))
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["factors"] * group["factor"])

    def _factor(self, param: Any) -> float:
        """What the shape makes of the factor."""
        check_shape(self, param, self.stacks)
        along = row_dims(param, self.stacks)
        rows, columns = param.shape[along[0] - 1], math.prod([param.shape[d] for d in along])
        size = 1 / max(columns, 1)
        return math.sqrt(rows * size) if self.by == "sqrt_ratio" else size
