"""EqualRows: all rows of a matrix as long as their mean square."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule
from torchzero_clip.modules.matrices.batches import check_shape, over_matrices, row_dims


class EqualRows(NormRule):
    """each row of u ← row · ‖u‖ / (√rows · ‖row‖)

    The matrix keeps its norm; a row of zeros stays zero. Before `Orthogonalize` it evens out the
    singular values, so that fewer iterations do.

    Args:
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.

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

    stacks: bool | None = None

    dim = ()  # slices, which `dims` names
    sets_norm = True
    clips = False
    pure = True

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        check_shape(self, tensor, self.stacks)
        return row_dims(tensor, self.stacks)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm = units.norm()
        size = over_matrices(units, norm, self.stacks)
        limit = size / over_matrices(units, torch.ones_like(norm), self.stacks)
        limit = torch.where(size == math.inf, torch.zeros_like(limit), limit)
        self.scale(units, norm, [limit] * len(units.groups))
        return buckets
