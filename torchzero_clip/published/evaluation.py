"""Methods that keep a second copy of the weights, such as averaged weights for evaluation."""

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
    """Run AdamW with an average of the weights in place of the momentum and the schedule.

    For a warm-up, use a schedule that increases `lr` and then keeps `lr` constant.

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682.
    """
    return Chain(
        Adam(betas, eps, momentum=False),
        WeightDecay(weight_decay),
        LR(lr),
        ScheduleFree(None, r, weight_lr_power),
    )


@published
def schedule_free_radam(
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Chain:
    """Run Schedule-Free AdamW with the short first steps of RAdam in place of a warm-up.

    Reference:
        Defazio et al., "The road less scheduled", arXiv 2405.15682; Liu et al., "On the variance of
        the adaptive learning rate and beyond", arXiv 1908.03265.
    """
    return Chain(
        Adam(betas, eps, momentum=False),
        WeightDecay(weight_decay),
        LR(lr),
        ScheduleFree(None, r, weight_lr_power, rectified=True),
    )


@published
def schedule_free_sgd(
    lr: float = 1.0,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> Chain:
    """Run SGD with an average of the weights in place of the momentum and the schedule.

    For a warm-up, use a schedule that increases `lr` and then keeps `lr` constant.

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
    """Run AdamW and evaluate an exponential moving average of its weights.

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101;
        torch.optim.swa_utils.
    """
    return Chain(Adam(betas, eps), WeightDecay(weight_decay), LR(lr), WeightEMA(decay))


@published
def lookahead_adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    k: int = 6,
    alpha: float = 0.5,
) -> Chain:
    """Run Adam, and return the weights to slow weights every `k` steps.

    The defaults of `k` and `alpha` are the defaults of timm. In pytorch_optimizer, `k` is 5 by
    default.

    Reference:
        Zhang et al., "Lookahead optimizer: k steps forward, 1 step back", arXiv 1907.08610.
    """
    return Chain(WeightDecay(weight_decay), Adam(betas, eps), LR(lr), Lookahead(k, alpha))
