"""Methods that find their learning rate: `lr` is a factor of it, and 1 unless it is scheduled."""

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
    """Adam whose learning rate is an estimate of how far away the solution is.

    Reference:
        Mishchenko, Defazio, "Prodigy: an expeditiously adaptive parameter-free learner",
        arXiv 2306.06101.
    """
    averages = betas, beta3, eps, weight_decay, decouple, use_bias_correction, safeguard_warmup
    return Chain(Prodigy(*averages, d0, d_coef, growth_rate), LR(lr))


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
    """Adam whose learning rate is a lower bound of how far away the solution is.

    `layer_scale` is a key of the authors' parameter groups.

    Reference:
        Defazio, Mishchenko, "Learning-rate-free learning by D-adaptation", arXiv 2301.07733.
    """
    averages = lr, betas, eps, weight_decay, decouple, use_bias_correction
    return Chain(DAdaptAdam(*averages, d0, growth_rate, layer_scale))
