"""Variants of AdamW. Each variant adds one change to the gradient, the update or the decay."""

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
    """Keep only the elements of an AdamW step whose sign agrees with the gradient.

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
    """Run AdamW, and replace the sign of each element of the step by the sign of the gradient.

    The authors' code adds `eps` to √v before the bias correction of v. Its `eps` therefore acts
    like eps / √(1 - β₂ᵗ) here. If β₂ is 0.999, the two differ for a few thousand steps.

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
    """Run AdamW with a decay that follows the square of the schedule, for normalized layers.

    The decay is multiplied by lr / (the largest lr so far). During a warm-up, this ratio is 1.
    pytorch_optimizer divides by the initial lr instead. Early in a warm-up, when lr is a tenth of
    the initial lr, the decay of pytorch_optimizer is therefore a tenth of the decay here. For other
    weights, use a separate group with `weight_decay=0`, or use `Masked` with a different decay.

    pytorch_optimizer adds `eps` to √v before the bias correction of v. Its `eps` therefore acts
    like eps / √(1 - β₂ᵗ) here. If β₂ is 0.999, the two differ for a few thousand steps.

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
    """Clip each tensor to a multiple of its past norms before AdamW.

    In pytorch_optimizer, `rel` and `abs` are called `lambda_rel` and `lambda_abs`. It always clips
    the first step to `lambda_abs`. Here, a `warmup_steps` of 0 or 1 means that nothing clips the
    first step.

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
    """Run AdamW with shorter steps, including decay, if gradients are larger than their average.

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
    """Clip spikes of single elements, run Adam, and reset the state of both regularly (SPAM).

    A reset does not change the step count. Weight decay uses the weights after the step. In the
    authors' code, `every`, `warmup` and `wait` are called `DeltaT`, `warmup_steps` and
    `grad_accu_steps`. The code adds `eps` to √v before the bias correction of v. Its `eps`
    therefore acts like eps / √(1 - β₂ᵗ) here. If v of an element is 0 when the clipping starts, the
    code clips the element to 0. Here, the element has no limit.

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
    """Clip elements and scale norms, run AdamW, and reset the state of AdamW regularly.

    With `past_only=True`, a spike does not raise its own limit. In the authors' code, `gammas` is
    `gamma1` and `gamma2`, `theta` is `gamma3`, and `every` is `update_proj_gap`. There, a gradient
    of zero lowers the limit of the elements, and a reset also restarts the bias corrections of the
    clipping and of the norms, but keeps their averages. After a reset the limit is therefore much
    larger. Here, only the state of AdamW restarts, and a gradient of zero does not change the
    limit.

    Reference:
        Huang et al., "Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam",
        arXiv 2502.17055.
    """
    return Chain(
        AdaClip(theta, past_only),
        AdaGN(gammas, eps),
        Reset(Adam(betas, eps), every),
        WeightDecay(weight_decay),
        LR(lr),
    )
