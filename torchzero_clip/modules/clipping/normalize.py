"""Normalize: a rule that sets the norm."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class Normalize(NormRule):
    """Normalized gradient: scales every update, up or down, to the norm `norm_value`.

    Use it if the norm of the gradient should not matter. The length of a step then depends only on
    the learning rate.

    u ← u · norm_value / ‖u‖

    An update with norm zero stays zero.

    Args:
        norm_value: The norm of every result. Default: 1.0.
        ord: The norm to measure: a number such as 2, or a name such as "l1", "linf", "rms", "std"
            or "mad". Default: 2.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`.
            Default: None, one norm per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.
        per_shape: A factor for `norm_value` that depends on the shape of a matrix. "sqrt_min" is
            √min(rows, columns), the norm of a matrix with orthonormal rows or columns. "sqrt_rows"
            is √rows. With `dim=None` a tensor is one matrix of shape (first, rest). With
            `dim=(-2, -1)` a tensor is a stack of matrices. Other scopes raise an error.
            Default: None, no factor.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Normalize
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Normalize(dim="global"), LR(1e-2))
    """

    norm_value: Live[NonNegative] = 1.0
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1
    per_shape: Literal["sqrt_min", "sqrt_rows"] | None = None

    sets_norm = True
    leaves = "own"
    pure = True

    @property
    def limit_is(self) -> str | None:  # type: ignore[override]
        return "norm_value" if self.per_shape is None else None

    def check(self) -> None:
        super().check()
        pair = isinstance(self.dim, (tuple, list)) and sorted(self.dim) == [-2, -1]
        whole = self.dim is None or pair
        if self.per_shape is not None and not (whole and not self.inverse_dims):
            raise ValueError(
                f"Normalize: per_shape={self.per_shape!r} needs norms of matrices, so dim must be "
                f"None or (-2, -1), got dim={self.dim!r}, inverse_dims={self.inverse_dims}"
            )

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        value = group["norm_value"]
        if self.per_shape is None:
            return value
        is_stack = self.dim is not None
        by_shorter_side = self.per_shape == "sqrt_min"
        return value * self.of_shapes(norm, group, _factor_of_shape, is_stack, by_shorter_side)


def _factor_of_shape(shape: torch.Size, is_stack: bool, by_shorter_side: bool) -> float:
    """Return √min(rows, columns), or √rows, of a matrix or of each matrix in a stack."""
    first = max(len(shape) - 2, 0) if is_stack else 0
    rows = math.prod(shape[first : first + 1])
    columns = math.prod(shape[first + 1 :])
    return math.sqrt(min(rows, columns) if by_shorter_side else rows)
