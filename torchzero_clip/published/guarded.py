"""AdamW with one idea more."""

from __future__ import annotations

from torchzero_clip.core import Chain
from torchzero_clip.modules.adaptive import AdaClip, AdaGC, AdaGN, SpikeClip
from torchzero_clip.modules.descent import LR, Adam, Cautious, Grams, StableAdam, WeightDecay
from torchzero_clip.modules.flow import Reset
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
def grams(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Chain:
    """AdamW whose entries go as far as ever, and the way that the gradient points.

    Reference:
        Cao et al., "Grams: gradient descent with adaptive momentum scaling", arXiv 2412.17107.
    """
    return Chain(Adam(betas, eps), Grams(), WeightDecay(weight_decay), LR(lr))


@published
def adamc(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Chain:
    """AdamW whose decay falls with the square of a schedule, for weights before a normalisation.

    It is times lr over the largest lr so far, which is 1 while a warm-up rises; pytorch_optimizer
    divides by the lr that it was made with, so that its decay at a tenth of it is a tenth of ours.
    Give other weights a group of their own with `weight_decay=0`, or `Masked` another decay.

    Reference:
        Defazio, "Why gradients rapidly increase near the end of training", arXiv 2506.02285;
        pytorch_optimizer.AdamC with `normalized=True` groups.
    """
    return Chain(Adam(betas, eps), WeightDecay(weight_decay, follows_lr=True), LR(lr))


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


@published
def stable_adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
) -> Chain:
    """AdamW that steps shorter where gradients outgrow their own average, decay and all.

    Reference:
        Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
        arXiv 2304.13013; optimi.StableAdamW.
    """
    return Chain(StableAdam(betas, eps, weight_decay), LR(lr))


@published
def spam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    threshold: float = 5000.0,
    weight_decay: float = 0.0,
    every: int = 500,
    warmup: int = 150,
    wait: int = 20,
) -> Chain:
    """Adam behind a clip of single entries; both forget all but the count of steps now and then.

    The decay is of the weights that the step leaves.

    Reference:
        Huang et al., "SPAM: spike-aware Adam with momentum reset for stable LLM training",
        arXiv 2501.06842.
    """
    links = Chain(SpikeClip(threshold, None, wait, every), Adam(betas, eps))
    decay = WeightDecay(weight_decay, afterwards=True)
    return Chain(Reset(links, every, warmup, keep=("step",)), decay, LR(lr))


@published
def stable_spam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gammas: tuple[float, float] = (0.7, 0.9),
    theta: float = 0.999,
    every: int = 1000,
    past_only: bool = False,
) -> Chain:
    """AdamW that forgets now and then, behind a clip of entries and a damping of norms.

    With `past_only=True` a spike does not raise the bound that it is cut to.

    Reference:
        Huang et al., "Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam",
        arXiv 2502.17055.
    """
    gradient = AdaClip(theta, past_only), AdaGN(gammas, eps)
    return Chain(*gradient, Reset(Adam(betas, eps), every), WeightDecay(weight_decay), LR(lr))
