"""Methods that estimate the learning rate. `lr` multiplies the estimate and is 1 by default."""

from __future__ import annotations

import math

from torchzero_clip.core import Chain
from torchzero_clip.modules.descent import LR, DAdaptAdam, Prodigy
from torchzero_clip.published.name import published


@published
def prodigy(
    lr: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    beta3: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decouple: bool = True,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    d0: float = 1e-6,
    d_coef: float = 1.0,
    growth_rate: float = math.inf,
) -> Chain:
    """Run Adam, and use an estimate of the distance to the solution as the learning rate.

    Reference:
        Mishchenko, Defazio, "Prodigy: an expeditiously adaptive parameter-free learner",
        arXiv 2306.06101.
    """
    direction = Prodigy(
        betas,
        beta3,
        eps,
        weight_decay,
        decouple,
        use_bias_correction,
        safeguard_warmup,
        d0,
        d_coef,
        growth_rate,
    )
    return Chain(direction, LR(lr))


@published
def dadapt_adam(
    lr: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decouple: bool = False,
    use_bias_correction: bool = False,
    d0: float = 1e-6,
    growth_rate: float = math.inf,
    layer_scale: float = 1.0,
) -> Chain:
    """Run Adam, and use a lower bound of the distance to the solution as the learning rate.

    In the authors' code, `layer_scale` is a key of the parameter groups.

    Reference:
        Defazio, Mishchenko, "Learning-rate-free learning by D-adaptation", arXiv 2301.07733.
    """
    direction = DAdaptAdam(
        lr,
        betas,
        eps,
        weight_decay,
        decouple,
        use_bias_correction,
        d0,
        growth_rate,
        layer_scale,
    )
    return Chain(direction)
