"""Relatives of Adam: each divides one average by another average."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.descent import (
    ADOPT,
    CAME,
    LR,
    AdaBelief,
    AdamAtan2,
    Adan,
    LaProp,
    WeightDecay,
    Yogi,
)
from torchzero_clip.published.name import published


@published
def adam_atan2(
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    a: float = 1.27,
    b: float = 1.0,
) -> Chain:
    """Run AdamW with an arctangent in place of the division, so that no eps is needed.

    Reference:
        Everett et al., "Scaling exponents across parameterizations and optimizers",
        arXiv 2407.05872; lucidrains/adam-atan2-pytorch.
    """
    return Chain(AdamAtan2(betas, a, b), WeightDecay(weight_decay), LR(lr))


@published
def adabelief(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-16,
    weight_decay: float = 0.0,
    rectify: bool = True,
) -> Chain:
    """Divide momentum by the root of the mean squared deviation of gradients from their average.

    Reference:
        Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed
        gradients", arXiv 2010.07468.
    """
    return Chain(AdaBelief(betas, eps, rectify), WeightDecay(weight_decay), LR(lr))


@published
def adan(
    lr: float = 1e-3,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    no_prox: bool = False,
) -> Chain:
    """Run Adam with an added average of gradient differences, and decay the weights after the step.

    For the authors' `max_grad_norm`, add `ClipNorm(max_grad_norm, dim="global")` before the chain.

    Reference:
        Xie et al., "Adan: adaptive Nesterov momentum algorithm for faster optimizing deep models",
        arXiv 2208.06677.
    """
    decay = WeightDecay(weight_decay, proximal=not no_prox)
    return Chain(Adan(betas, eps), decay, LR(lr))


@published
def adopt(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.9999),
    eps: float = 1e-6,
    clip_power: float | None = 0.25,
    weight_decay: float = 0.0,
    decouple: bool = False,
) -> Chain:
    """Divide each gradient by the RMS of earlier gradients, then add momentum.

    In the authors' code, `clip_lambda` is a function of the step count. The default is the fourth
    root of the step count. Here, `clip_power` is the exponent of the step count.

    Reference:
        Taniguchi et al., "ADOPT: modified Adam can converge with any β₂ with the optimal rate",
        arXiv 2411.02853.
    """
    return Chain(ADOPT(betas, eps, clip_power, weight_decay, decouple), LR(lr))


@published
def came(
    lr: float = 2e-4,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    eps: tuple[float, float] = (1e-30, 1e-16),
    clip_threshold: float = 1.0,
    weight_decay: float = 0.0,
) -> Chain:
    """Add momentum to Adafactor, and divide it by the deviation of updates from the momentum.

    Reference:
        Luo et al., "CAME: confidence-guided adaptive memory efficient optimization",
        arXiv 2307.02047.
    """
    return Chain(CAME(betas, eps, clip_threshold), WeightDecay(weight_decay), LR(lr))


@published
def laprop(
    lr: float = 4e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-15,
    weight_decay: float = 0.0,
) -> Chain:
    """Divide each gradient first, then add momentum, and decay the weights after the step.

    Here, the decay is multiplied by the learning rate. The authors' code multiplies the weights by
    1 - weight_decay.

    Reference:
        Ziyin et al., "LaProp: separating momentum and adaptivity in Adam", arXiv 2002.04839.
    """
    return Chain(LaProp(betas, eps), WeightDecay(weight_decay, afterwards=True), LR(lr))


@published
def yogi(
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-3,
    weight_decay: float = 0.0,
    initial_accumulator: float = 1e-6,
) -> Chain:
    """Run Adam with a second moment that rises and falls only in small steps.

    Reference:
        Zaheer et al., "Adaptive methods for nonconvex optimization", NeurIPS 2018;
        torch_optimizer.Yogi.
    """
    direction = Yogi(betas, eps, initial_accumulator)
    return Chain(WeightDecay(weight_decay), direction, LR(lr))
