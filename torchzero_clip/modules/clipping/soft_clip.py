"""SoftClip: a smooth norm clip that never exceeds max_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class SoftClip(NormRule):
    """u ← u / (1 + ‖u‖ / max_norm)

    Small updates pass almost unchanged, large ones approach max_norm; unlike `ClipNorm` the curve
    has no corner, and every update shrinks a little.

    Args:
        max_norm: What the norm approaches and never exceeds.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SoftClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SoftClip(1.0, dim="global"), Adam(), LR(1e-3))
    """

    max_norm: Live[NonNegative]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        bound = torch.zeros_like(norm) + group["max_norm"]
        return torch.where(torch.isinf(bound), bound, bound / (1 + bound / norm))
