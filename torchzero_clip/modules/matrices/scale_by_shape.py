"""ScaleByShape: a rule that scales an update by a factor of the matrix shape."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Finite
from torchzero_clip.core.norms import numbers
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.modules.matrices.batches import check_shape, row_dims


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
        stacks: How to treat a tensor with three dims. True means a stack of matrices. False means
            one matrix of shape (first, rest). None raises an error. With four or more dims, a
            tensor is one matrix of shape (first, rest), and True raises an error. Default: None.

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
        """Return the factor for the shape of a parameter."""
        check_shape(self, param, self.stacks)
        along = row_dims(param, self.stacks)
        rows = param.shape[along[0] - 1]
        columns = math.prod([param.shape[d] for d in along])
        inverse_columns = 1 / max(columns, 1)
        return math.sqrt(rows * inverse_columns) if self.by == "sqrt_ratio" else inverse_columns
