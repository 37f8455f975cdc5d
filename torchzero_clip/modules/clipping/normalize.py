"""Normalize: the norm exactly norm_value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, TensorList, Units, UnitState
from torchzero_clip.core.norms import numbers


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
        >>> opt = Modular(model.parameters(), Normalize(dim="global"), LR(1e-2))
    """

    norm_value: Live[float] = 1.0
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1
    per_shape: Literal["sqrt_min", "sqrt_rows"] | None = None

    sets_norm = True

    def check(self) -> None:
        super().check()
        self.require("norm_value", at_least=0)
        self.require_one_of("per_shape", (None, "sqrt_min", "sqrt_rows"))
        pair = isinstance(self.dim, (tuple, list)) and sorted(self.dim) == [-2, -1]
        whole = self.dim is None or pair
        if self.per_shape is not None and not (whole and not self.inverse_dims):
            raise ValueError(
                f"Normalize: per_shape={self.per_shape!r} needs units that are matrices, dim=None "
                f"or dim=(-2, -1), got dim={self.dim!r}, inverse_dims={self.inverse_dims}"
            )

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["norm_value"]

    def scale(
        self,
        units: Units,
        norm: Tensor,
        limits: Sequence[Tensor | float],
        updates: Sequence[TensorList] | None = None,
    ) -> list[Tensor]:
        if self.per_shape is not None:
            shapes = [p.shape for bucket in units.buckets for p in bucket.originals]
            factors = numbers([x for shape in shapes for x in self._factors(shape)], norm)
            limits = [limit * factors for limit in limits]
        return super().scale(units, norm, limits, updates)

    def _factors(self, shape: Sequence[int]) -> list[float]:
        """The factor of each unit of a tensor."""
        count, split = 1, 1
        if self.dim is not None:
            split = max(len(shape) - 1, 1)
            count = math.prod(shape[: split - 1])
        rows, columns = math.prod(shape[split - 1 : split]), math.prod(shape[split:])
        return [math.sqrt(min(rows, columns) if self.per_shape == "sqrt_min" else rows)] * count
