"""SGD, Adagrad, RMSprop and Adam, with the arguments of torch.optim."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.descent import LR, Adagrad, Adam, Momentum, RMSprop, WeightDecay
from torchzero_clip.published.name import published


@published
def sgd(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Chain:
    """The gradient, or with momentum a running sum of gradients.

    Reference:
        Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013; torch.optim.SGD.
    """
    summed = [Momentum(momentum, nesterov, dampening)] if momentum else []
    return Chain(WeightDecay(weight_decay), *summed, LR(lr))


@published
def adagrad(
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Chain:
    """The gradient over the root of the sum of its squares.

    Reference:
        Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic
        optimization", JMLR 12 (2011); torch.optim.Adagrad.
    """
    adaptive = Adagrad(lr_decay, initial_accumulator_value, eps)
    return Chain(WeightDecay(weight_decay), adaptive, LR(lr))


@published
def rmsprop(
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> Chain:
    """The gradient over the root of the average of its squares.

    Reference:
        Hinton, "Neural networks for machine learning", lecture 6e; Graves, arXiv 1308.0850;
        torch.optim.RMSprop.
    """
    return Chain(WeightDecay(weight_decay), RMSprop(alpha, eps, momentum, centered), LR(lr))


@published
def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Chain:
    """Momentum over the root of the second moment; the decay joins the gradient, as an L2 penalty.

    Reference:
        Kingma, Ba, "Adam: a method for stochastic optimization", arXiv 1412.6980; torch.optim.Adam.
    """
    return Chain(WeightDecay(weight_decay), Adam(betas, eps, amsgrad), LR(lr))


@published
def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Chain:
    """Adam, and beside it a decay of the weights that no average sees.

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101;
        torch.optim.AdamW.
    """
    return Chain(Adam(betas, eps, amsgrad), WeightDecay(weight_decay), LR(lr))
