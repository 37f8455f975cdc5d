"""AdEMAMix: Adam with a second, much slower momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Count, NonNegative, Share
from torchzero_clip.core.state import averages_of


class AdEMAMix(Transform):
    """AdEMAMix: Adam with a second, much slower average of the gradients.

    Use it for long runs, in which very old gradients still help. The state has one more tensor per
    parameter than the state of `Adam`.

    s ← β₃ s + (1 - β₃) u;   u ← (m̂ + alpha · s) / (√v̂ + eps)

    Here m̂ and v̂ are the averages of `Adam`. The slow average s starts at zero, without bias
    correction.

    Args:
        betas: The decay rates of the averages m, v and s. Default: (0.9, 0.999, 0.9999).
        alpha: The weight of the slow average. Default: 2.0.
        eps: A small number that is added to the denominator. Default: 1e-8.
        alpha_warmup: The number of steps in which `alpha` grows linearly from 0, or None for no
            warm-up. Default: None.
        beta3_warmup: The number of steps in which β₃ grows from β₁ to its full value, or None for
            no warm-up. The half-life of s grows linearly. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdEMAMix, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> mix = AdEMAMix(alpha=8.0, alpha_warmup=100_000, beta3_warmup=100_000)
        >>> opt = Modular(model.parameters(), mix, WeightDecay(0.1), LR(1e-3))

    Reference:
        Pagliardini et al., "The AdEMAMix optimizer: better, faster, older", arXiv 2409.03137.
    """

    betas: Live[tuple[Share, Share, Share]] = (0.9, 0.999, 0.9999)
    alpha: Live[NonNegative] = 2.0
    eps: Live[NonNegative] = 1e-8
    alpha_warmup: Live[Count | None] = None
    beta3_warmup: Live[Count | None] = None

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_slow", "exp_avg_sq")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2, _ = group["betas"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        slow = state["exp_avg_slow"].lerp_(u, 1 - self._beta3(t, group))
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        mix = slow.mul(self._alpha(t, group)).add_(m.div(1 - beta1**t))
        # the denominator goes into the memory of u, which saves a temporary tensor
        u = u.copy_(v).sqrt_().div_((1 - beta2**t).sqrt()).add_(group["eps"])
        return u.div_(mix).reciprocal_()

    def _alpha(self, t: Tensor, group: Group) -> Any:
        """Return the weight of the slow average in step t."""
        steps = group["alpha_warmup"]
        alpha = group["alpha"]
        return alpha if steps is None else (t / steps).clamp(max=1) * alpha

    def _beta3(self, t: Tensor, group: Group) -> Any:
        """Return β₃ in step t. The warm-up starts at β₁, and the half-life grows linearly."""
        steps = group["beta3_warmup"]
        beta1, _, beta3 = group["betas"]
        if steps is None:
            return beta3
        first, last = [_half_life(torch.zeros_like(t) + beta) for beta in (beta1, beta3)]
        middle = torch.lerp(first, last, t / steps)
        return torch.where(t < steps, 0.5 ** (1 / middle), beta3)


def _half_life(beta: Tensor) -> Tensor:
    """Return the number of steps after which half of an average is forgotten."""
    return math.log(0.5) / torch.log(beta + 1e-8)  # 1e-8 avoids log(0), as in the official code
