"""Methods whose step is a sign, so that every element moves by the same amount."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.clipping import Sign
from torchzero_clip.modules.descent import EMA, LR, Lion, WeightDecay
from torchzero_clip.published.name import published


@published
def lion(
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> Chain:
    """Use the sign of an interpolation between momentum and gradient, with decoupled decay.

    Reference:
        Chen et al., "Symbolic discovery of optimization algorithms", arXiv 2302.06675.
    """
    return Chain(Lion(betas), WeightDecay(weight_decay), LR(lr))


@published
def signum(lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> Chain:
    """Use the sign of an average of gradients. With `momentum=0`, this is signSGD.

    Reference:
        Bernstein et al., "signSGD: compressed optimisation for non-convex problems",
        arXiv 1802.04434.
    """
    return Chain(EMA(momentum), Sign(), WeightDecay(weight_decay), LR(lr))
