"""Variants of AdamW with a different average of the gradient."""

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
    """Run AdamW on gradients plus a multiple of their last change, each tensor clipped to norm 1.

    The paper uses this method for matrices. For vectors, the paper uses AdamW with a separate
    learning rate.

    Reference:
        Yuan et al., "MARS: unleashing the power of variance reduction for training large models",
        arXiv 2411.10438.
    """
    return Chain(
        Mars(None, gamma), ClipNorm(1.0), Adam(betas, eps), WeightDecay(weight_decay), LR(lr)
    )


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
    """Run AdamW with a second, much slower average of gradients (over about ten thousand steps).

    Reference:
        Pagliardini et al., "The AdEMAMix optimizer: better, faster, older", arXiv 2409.03137.
    """
    mix = AdEMAMix(betas, alpha, eps, alpha_warmup, beta3_warmup)
    return Chain(mix, WeightDecay(weight_decay), LR(lr))
