"""TrustRatio: the update in proportion to the weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class TrustRatio(NormRule):
    """u ← u · min(max(coefficient · ‖w‖ / ‖u‖, low), high), and u where either norm is zero

    After Adam and WeightDecay it is LAMB (tested against optax). LARS scales before its momentum:
    WeightDecay, TrustRatio, LR, then Momentum (tested against optax).

    Args:
        coefficient: The ratio of the norms that every step has.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.
        bounds: low and high, between which the factor stays.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, TrustRatio, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), TrustRatio(), LR(1e-3))

    Reference:
        You et al., "Large batch training of convolutional networks", arXiv 1708.03888, and
        "Large batch optimization for deep learning", arXiv 1904.00962; Fong et al., "Improving
        layer-wise adaptive rate methods using trust ratio clipping", arXiv 2011.13584.
    """

    coefficient: Live[NonNegative] = 1.0
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1
    bounds: Live[tuple[NonNegative, NonNegative]] = (0.0, math.inf)

    sets_norm = True
    leaves = "own"
    clips = False
    pure = True

    def check(self) -> None:
        super().check()
        low, high = self.bounds
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low > high:
            raise ValueError(
                f"TrustRatio: bounds must be low and high in order, got {self.bounds!r}"
            )

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        weight, (low, high) = self.measure(group["params"]), group["bounds"]
        limit = group["coefficient"] * weight
        share = limit / norm
        factor = share.clamp(min=low).clamp(max=high)
        held = (factor != share) & torch.isfinite(norm)  # an infinite norm has no share to raise
        limit = torch.where(held, factor * norm, limit)
        return torch.where(weight > 0, limit, norm)
