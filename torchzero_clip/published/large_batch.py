"""Methods whose step is in proportion to the weight of each layer."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.adaptive import TrustRatio
from torchzero_clip.modules.descent import LR, Adam, Momentum, WeightDecay
from torchzero_clip.published.name import published


@published
def lars(
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    nesterov: bool = False,
) -> Chain:
    """The momentum of steps that are each a share of their weight.

    The scaling comes before the momentum, and so does the learning rate: what the sum remembers are
    steps, and a change of `lr` acts on the new ones alone. The paper leaves biases and the weights
    of normalisation out of decay and scaling.

    Reference:
        You, Gitman, Ginsburg, "Large batch training of convolutional networks", arXiv 1708.03888;
        optax.lars.
    """
    scaled = WeightDecay(weight_decay), TrustRatio(trust_coefficient)
    return Chain(*scaled, LR(lr), Momentum(momentum, nesterov))


@published
def lamb(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Chain:
    """Adam's direction with decay, scaled to the norm of each weight.

    With `ClipNorm(1.0, dim="global")` in front it is the LAMB of timm (tested against timm), whose
    weight decay is 0.01 by default.

    Reference:
        You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        arXiv 1904.00962; optax.lamb.
    """
    return Chain(Adam(betas, eps), WeightDecay(weight_decay), TrustRatio(), LR(lr))


@published
def lambc(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Chain:
    """LAMB that makes no step longer than Adam's, since its ratio stays between two bounds.

    Reference:
        Fong et al., "Improving layer-wise adaptive rate methods using trust ratio clipping",
        arXiv 2011.13584; timm.optim.Lamb with trust_clip=True.
    """
    return Chain(Adam(betas, eps), WeightDecay(weight_decay), TrustRatio(bounds=bounds), LR(lr))
