"""Normalize: the norm exactly norm_value."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class Normalize(NormRule):
    """u ← u · norm_value / ‖u‖

    Args:
        norm_value: The norm that every unit gets. A unit of norm zero stays zero.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.
        per_shape: norm_value times √min(rows, columns) with "sqrt_min", the norm of a matrix with
            orthonormal rows or columns, or √rows with "sqrt_rows". A tensor counts as (first,
            rest), and with dim=(-2, -1) each matrix of a stack as it is.

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
                f"Normalize: per_shape={self.per_shape!r} needs units that are matrices, dim=None "
                f"or dim=(-2, -1), got dim={self.dim!r}, inverse_dims={self.inverse_dims}"
            )

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        value = group["norm_value"]
        if self.per_shape is None:
            return value
        stacks, least = self.dim is not None, self.per_shape == "sqrt_min"
        return value * self.of_shapes(norm, group, _factor_of_shape, stacks, least)


def _factor_of_shape(shape: torch.Size, stacks: bool, least: bool) -> float:
    """√rows of a matrix or of a stack of them, or √min(rows, columns)."""
    first = max(len(shape) - 2, 0) if stacks else 0
    rows, columns = math.prod(shape[first : first + 1]), math.prod(shape[first + 1 :])
    return math.sqrt(min(rows, columns) if least else rows)
