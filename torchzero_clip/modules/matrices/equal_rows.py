"""EqualRows: a rule that gives all rows of a matrix the same norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.modules.matrices.batches import grid_for


class EqualRows(NormRule):
    """EqualRows gives all rows of a matrix the same norm. The norm of the matrix does not change.

    Put it before `Orthogonalize`. The singular values become more equal, so fewer iterations are
    enough.

    each row of u ← row · ‖u‖ / (√rows · ‖row‖)

    A row of zeros stays zero.

    Args:
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, EqualRows, Modular, Momentum, Orthogonalize
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> muon = Momentum(0.95, nesterov=True), EqualRows(), Orthogonalize(scale="original")
        >>> opt = Modular(matrices, *muon, LR(1e-3))

    Reference:
        MuonEq: "Balancing before orthogonalization with lightweight equilibration", arXiv
        2603.28254.
    """

    layout: MatrixLayout = None

    dim = ()  # units are slices, and `grid` returns them
    sets_norm = True
    clips = False
    pure = True

    def grid(self, name: str, param: Tensor) -> Grid:
        return grid_for(self, "row", name, param)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm = units.norm()
        ones = torch.ones_like(norm)
        size = units.over(norm)
        root_of_rows = units.over(ones)
        if units.division.has_finer:  # then a row has several slices
            root_of_rows = root_of_rows / units.over(ones, whole=False)
        norm = units.over(norm, whole=False)
        limit = size / root_of_rows
        limit = torch.where(size == math.inf, torch.zeros_like(limit), limit)
        self.scale(units, norm, [limit] * len(units.groups))
        return buckets
