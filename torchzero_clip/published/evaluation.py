"""Methods that are judged at other weights than those that they train."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.averages import Lookahead, ScheduleFree, WeightEMA
from torchzero_clip.modules.descent import LR, Adam, WeightDecay
from torchzero_clip.published.name import published


@published
def schedule_free_adamw(
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Chain:
    """AdamW with an average of weights in place of momentum and schedule.

    A warm-up is a schedule of lr that rises and stays.

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682.
    """
    adamw = Adam(betas, eps, momentum=False), WeightDecay(weight_decay), LR(lr)
    return Chain(*adamw, ScheduleFree(None, r, weight_lr_power))


@published
def schedule_free_radam(
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Chain:
    """Schedule-Free AdamW whose first steps are as short as those of RAdam, in place of a warm-up.

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682; Liu et al., "On the variance of
        the adaptive learning rate and beyond", arXiv 1908.03265.
    """
    adamw = Adam(betas, eps, momentum=False), WeightDecay(weight_decay), LR(lr)
    return Chain(*adamw, ScheduleFree(None, r, weight_lr_power, rectified=True))


@published
def schedule_free_sgd(
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Chain:
    """The gradient, with an average of weights in place of momentum and schedule.

    A warm-up is a schedule of lr that rises and stays.

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682.
    """
    free = ScheduleFree(momentum, r, weight_lr_power)
    return Chain(WeightDecay(weight_decay), LR(lr), free)


@published
def ema_adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay: float = 0.999,
) -> Chain:
    """AdamW, judged at an exponential average of its weights.

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101;
        torch.optim.swa_utils.
    """
    adamw = Adam(betas, eps), WeightDecay(weight_decay), LR(lr)
    return Chain(*adamw, WeightEMA(decay))


@published
def lookahead_adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    k: int = 6,
    alpha: float = 0.5,
) -> Chain:
    """Adam, whose weights are drawn back to slow ones every k steps.

    Reference:
        Zhang et al., "Lookahead optimizer: k steps forward, 1 step back", arXiv 1907.08610.
    """
    adam = WeightDecay(weight_decay), Adam(betas, eps), LR(lr)
    return Chain(*adam, Lookahead(k, alpha))
