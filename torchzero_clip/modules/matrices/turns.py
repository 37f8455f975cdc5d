"""Turns: the way from the bases of matrices to new ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.eigenbases import back, into, ordered


class BasisTurn(NamedTuple):
    """The way from the bases of matrices to new ones, if these will be taken."""

    new: MatrixState
    orders: dict[int, Tensor]
    taken: Tensor

    def of(self, x: Tensor, state: MatrixState, linear: bool) -> Tensor:
        """What is kept in the old bases, in the new ones; only sorted unless it is linear."""
        made = x
        if linear:
            made = into(back(x, state), self.new)
        else:
            for dim, order in self.orders.items():
                made = ordered(made, order, dim)
        return torch.where(self.taken[..., None, None], made, x)

    def part(self, some: slice) -> BasisTurn:
        """That of some of the matrices."""
        orders = {dim: order[some] for dim, order in self.orders.items()}
        return BasisTurn({name: t[some] for name, t in self.new.items()}, orders, self.taken[some])
