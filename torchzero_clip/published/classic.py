"""The methods of torch.optim, with torch's arguments."""

from __future__ import annotations

from torchzero_clip.core import Chain, Transform
from torchzero_clip.modules.descent import (
    ASGD,
    LR,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    Momentum,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    WeightDecay,
)
from torchzero_clip.published.name import published


@published
def sgd(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Chain:
    """Step along the gradient, or along a running sum of gradients if `momentum` is not 0.

    Reference:
        Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013; torch.optim.SGD.
    """
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov=True needs a momentum above 0: pass momentum=, such as 0.9")
    running_sum = Momentum(momentum, nesterov, dampening)  # checks the arguments in any case
    summed = [running_sum] if momentum else []
    return Chain(WeightDecay(weight_decay), *summed, LR(lr))


@published
def adagrad(
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Chain:
    """Divide the gradient by the root of the sum of all squared gradients.

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
    """Divide the gradient by the root of a running average of its squares.

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
    """Divide an average of gradients by the root of an average of their squares.

    Weight decay is added to the gradient, as an L2 penalty. For `decoupled_weight_decay=True` of
    torch, use `adamw`.

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
    """Run Adam with decoupled weight decay: the decay is not part of the averages of gradients.

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101;
        torch.optim.AdamW.
    """
    return Chain(Adam(betas, eps, amsgrad), WeightDecay(weight_decay), LR(lr))


@published
def nadam(
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> Chain:
    """Run Adam with Nesterov momentum, or NAdamW with `decoupled_weight_decay=True`.

    Reference:
        Dozat, "Incorporating Nesterov momentum into Adam", ICLR 2016 workshop; torch.optim.NAdam.
    """
    return _decayed(NAdam(betas, eps, momentum_decay), weight_decay, decoupled_weight_decay, lr)


@published
def radam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> Chain:
    """Run momentum without division until the second moment is reliable, and then Adam.

    Reference:
        Liu et al., "On the variance of the adaptive learning rate and beyond", arXiv 1908.03265;
        torch.optim.RAdam.
    """
    return _decayed(RAdam(betas, eps), weight_decay, decoupled_weight_decay, lr)


def _decayed(direction: Transform, weight_decay: float, decoupled: bool, lr: float) -> Chain:
    """Return a chain with weight decay before the direction, or after it if decoupled."""
    decay = WeightDecay(weight_decay)
    if decoupled:
        return Chain(direction, decay, LR(lr))
    return Chain(decay, direction, LR(lr))


@published
def adamax(
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Chain:
    """Divide momentum by the largest recent magnitude of the gradient.

    Reference:
        Kingma, Ba, "Adam: a method for stochastic optimization", arXiv 1412.6980;
        torch.optim.Adamax.
    """
    return Chain(WeightDecay(weight_decay), Adamax(betas, eps), LR(lr))


@published
def adadelta(
    lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> Chain:
    """Scale the gradient by the ratio of the RMS of recent steps to the RMS of recent gradients.

    Reference:
        Zeiler, "Adadelta: an adaptive learning rate method", arXiv 1212.5701; torch.optim.Adadelta.
    """
    return Chain(WeightDecay(weight_decay), Adadelta(rho, eps), LR(lr))


@published
def rprop(
    lr: float = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
) -> Chain:
    """Adapt the step size of every element to the signs of its gradients, with full batches.

    Reference:
        Riedmiller, Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
        algorithm", ICNN 1993; torch.optim.Rprop.
    """
    return Chain(Rprop(lr, etas, step_sizes))


@published
def asgd(
    lr: float = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
) -> Chain:
    """Run gradient descent with shrinking steps, and keep an average of the weights.

    Reference:
        Polyak, Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
        Control and Optimization 30 (1992); torch.optim.ASGD.
    """
    return Chain(WeightDecay(weight_decay), ASGD(lr, lambd, alpha, t0))


@published
def adafactor(
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Chain:
    """Run Adafactor: second moments per row and column, and steps relative to the weights.

    Reference:
        Shazeer, Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235; torch.optim.Adafactor.
    """
    return Chain(Adafactor(beta2_decay, eps, d), WeightDecay(weight_decay), LR(lr))
