"""AdaBelief: momentum over how far gradients are from what it expected."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of
from torchzero_clip.modules.descent.radam import rectified


class AdaBelief(Transform):
    """m ← β₁ m + (1 - β₁) u;   s ← β₂ s + (1 - β₂)(u - m)² + eps;   u ← m̂ / (√ŝ + eps)

    Args:
        betas: How much of m and of s is kept a step.
        eps: Added to s in every step, and to the denominator.
        rectify: Begin as `RAdam` does, with momentum until s can be trusted.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaBelief, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaBelief(), WeightDecay(0.01), LR(1e-3))

    Reference:
        Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed
        gradients", arXiv 2010.07468.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-16
    rectify: bool = True

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_var")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        (beta1, beta2), eps = group["betas"], group["eps"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        u.sub_(m)
        s = state["exp_avg_var"].mul_(beta2).addcmul_(u, u, 1 - beta2).add_(eps)
        root = u.copy_(s).sqrt_()
        if self.rectify:
            return rectified(m, root.add_(eps), t, group["betas"])
        root.div_((1 - beta2**t).sqrt()).add_(eps)
        return root.div_(m).reciprocal_().div_(1 - beta1**t)
