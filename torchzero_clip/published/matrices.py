"""Methods that treat a weight as a matrix."""

from __future__ import annotations

from typing import Literal

from torchzero_clip.core import Chain
from torchzero_clip.modules.descent import LR, Momentum, WeightDecay
from torchzero_clip.modules.matrices import Orthogonalize
from torchzero_clip.published.name import published


@published
def muon(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: Literal["original", "match_rms_adamw"] | None = "original",
) -> Chain:
    """A momentum whose matrices are made orthogonal; for matrices alone.

    torch.optim.Muon calls `scale` `adjust_lr_fn`.

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
        torch.optim.Muon.
    """
    direction = Momentum(momentum, nesterov), Orthogonalize(scale=scale)
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))
