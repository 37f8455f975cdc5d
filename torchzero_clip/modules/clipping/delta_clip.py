"""DeltaClip: the norm at most max_norm, but a share of it is always left."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import Fraction, NonNegative


class DeltaClip(NormRule):
    """u ← u · min(1, max(delta, max_norm / ‖u‖))

    `ClipNorm` that never shortens by more than the factor delta, so that a long gradient still says
    how long it was: its convergence is proven for wide networks.

    Args:
        max_norm: The largest norm that passes as it is.
        delta: The smallest factor.
        ord: Which norm, as in `ClipNorm`.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, DeltaClip, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = DeltaClip(1.0, 1e-3, dim="global")
        >>> opt = Modular(model.parameters(), clip, Momentum(0.9), LR(0.1))

    Reference:
        Tucat et al., "Regularized gradient clipping provably trains wide and deep neural networks",
        arXiv 2404.08624.
    """

    max_norm: Live[NonNegative]
    delta: Live[Fraction] = 1e-3
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        longest = (norm * group["delta"]).clamp(min=group["max_norm"])
        return torch.where(torch.isfinite(norm), longest, group["max_norm"])
