"""Normalize: the norm exactly norm_value."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState


class Normalize(NormRule):
    """u ← u · norm_value / ‖u‖

    Args:
        norm_value: The norm that every unit gets. A unit of norm zero stays zero.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> opt = Modular(model.parameters(), Normalize(dim="global"), LR(1e-2))
    """

    norm_value: Live[float] = 1.0
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    sets_norm = True

    def check(self) -> None:
        super().check()
        self.require("norm_value", at_least=0)

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["norm_value"]
