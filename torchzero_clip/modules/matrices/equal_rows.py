"""EqualRows: a rule that gives all rows of a matrix the same norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule
from torchzero_clip.modules.matrices.batches import check_shape, over_matrices, row_dims


class EqualRows(NormRule):
    """EqualRows gives all rows of a matrix the same norm. The norm of the matrix does not change.

    Put it before `Orthogonalize`. The singular values become more equal, so fewer iterations are
    enough.

    each row of u ← row · ‖u‖ / (√rows · ‖row‖)

    A row of zeros stays zero.

    Args:
        stacks: How to treat a tensor with three dims. True means a stack of matrices. False means
            one matrix of shape (first, rest). None raises an error. With four or more dims, a
            tensor is one matrix of shape (first, rest), and True raises an error. Default: None.

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

    dim = ()  # units are slices, and `dims` returns their dims
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
