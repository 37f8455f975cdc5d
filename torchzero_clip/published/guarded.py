"""AdamW with one idea more."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.adaptive import AdaGC
from torchzero_clip.modules.descent import LR, Adam, Cautious, WeightDecay
from torchzero_clip.published.name import published


@published
def cadamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Chain:
    """AdamW whose step keeps only the entries that agree with the gradient.

    Reference:
        Liang et al., "Cautious optimizers: improving training with one line of code",
        arXiv 2411.16085.
    """
    return Chain(Adam(betas, eps), Cautious(), WeightDecay(weight_decay), LR(lr))


@published
def adagc(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rel: float = 1.05,
    abs: float = 1.0,
    beta: float = 0.98,
    warmup_steps: int = 100,
) -> Chain:
    """AdamW behind a clip that holds each tensor within a factor of its own past.

    Reference:
        Wang et al., "AdaGC: improving training stability for large language model pretraining",
        arXiv 2502.11034.
    """
    clip = AdaGC(rel, abs, beta, warmup_steps)
    return Chain(clip, Adam(betas, eps), WeightDecay(weight_decay), LR(lr))
