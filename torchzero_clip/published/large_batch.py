"""Methods whose steps are proportional to the norm of each weight."""

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
    """Run SGD with momentum, with each step scaled to a fraction of the norm of its weight.

    The scaling and the learning rate come before the momentum. The momentum therefore sums steps,
    and a change of `lr` affects only new steps. For biases and the weights of normalization layers,
    the paper uses no decay and no scaling. In optax, `lr` is called `learning_rate`.

    Reference:
        You, Gitman, Ginsburg, "Large batch training of convolutional networks", arXiv 1708.03888;
        optax.lars.
    """
    return Chain(
        WeightDecay(weight_decay),
        TrustRatio(trust_coefficient),
        LR(lr),
        Momentum(momentum, nesterov),
    )


@published
def lamb(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Chain:
    """Run AdamW, and scale the update of each weight, including decay, to the norm of the weight.

    With `ClipNorm(1.0, dim="global")` before it, the chain is the LAMB of timm (tested against
    timm). In timm the default weight decay is 0.01. If the weight decay of a group is 0, timm takes
    the step of Adam, unless `always_adapt=True`. To do the same, put `TrustRatio` into `Masked`, so
    that it skips these parameters. In optax, `lr` is called `learning_rate`, and `betas` is `b1`
    and `b2`.

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
    """Run LAMB with a trust ratio of at most 1, so that no step is longer than the step of Adam.

    timm also clips the global norm to 1. To do the same, put `ClipNorm(1.0, dim="global")` before
    the chain. If the weight decay of a group is 0, timm takes the step of Adam, unless
    `always_adapt=True`. To do the same, put `TrustRatio` into `Masked`, so that it skips these
    parameters.

    Reference:
        Fong et al., "Improving layer-wise adaptive rate methods using trust ratio clipping",
        arXiv 2011.13584; timm.optim.Lamb with trust_clip=True.
    """
    return Chain(Adam(betas, eps), WeightDecay(weight_decay), TrustRatio(bounds=bounds), LR(lr))
