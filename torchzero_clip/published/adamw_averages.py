"""AdamW with other averages of the gradient."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.clipping import ClipNorm
from torchzero_clip.modules.descent import LR, Adam, AdEMAMix, Mars, WeightDecay
from torchzero_clip.published.name import published


@published
def mars_adamw(
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gamma: float = 0.025,
) -> Chain:
    """AdamW of gradients whose change since the last step is stretched, each of norm 1 at most.

    The paper has it for matrices, and AdamW with a rate of its own for vectors.

    Reference:
        Yuan et al., "MARS: unleashing the power of variance reduction for training large models",
        arXiv 2411.10438.
    """
    adamw = Adam(betas, eps), WeightDecay(weight_decay), LR(lr)
    return Chain(Mars(None, gamma), ClipNorm(1.0), *adamw)


@published
def ademamix(
    lr: float = 1e-3,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    alpha: float = 2.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    alpha_warmup: int | None = None,
    beta3_warmup: int | None = None,
) -> Chain:
    """AdamW with a second average of gradients, over ten thousand steps.

    Reference:
        Pagliardini et al., "The AdEMAMix optimizer: better, faster, older", arXiv 2409.03137.
    """
    mix = AdEMAMix(betas, alpha, eps, alpha_warmup, beta3_warmup)
    return Chain(mix, WeightDecay(weight_decay), LR(lr))
