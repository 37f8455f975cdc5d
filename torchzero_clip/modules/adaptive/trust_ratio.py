"""TrustRatio: the update in proportion to the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState


class TrustRatio(NormRule):
    """u ← u · coefficient · ‖w‖ / ‖u‖, and u where either norm is zero

    After Adam and WeightDecay it is LAMB {identity: lamb}. LARS scales before its momentum:
    WeightDecay, TrustRatio, LR, then Momentum {identity: lars}.

    Args:
        coefficient: The ratio of the norms that every step has.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), TrustRatio(), LR(1e-3))

    Reference:
        You et al., "Large batch training of convolutional networks", arXiv 1708.03888, and
        "Large batch optimization for deep learning", arXiv 1904.00962.
    """

    coefficient: Live[float] = 1.0
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    sets_norm = True

    def check(self) -> None:
        super().check()
        self.require("coefficient", at_least=0)

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        weight = self.measure(group["params"])
        return torch.where(weight > 0, group["coefficient"] * weight, norm)
