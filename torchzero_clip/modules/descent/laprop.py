"""LaProp: Adam that divides each gradient before the averaging."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import statistic


class LaProp(Transform):
    """LaProp: Adam in a different order. It divides each gradient first, and averages the results.

    `LaProp` is more stable than `Adam` if β₁ is close to β₂ or above β₂.

    m ← β₁ m + (1 - β₁) lr · u / (√v̂ + eps);   r ← β₁ r + (1 - β₁) lr;   u ← m / r

    Here v̂ is the average of u² with bias correction, as in `Adam`. Each divided gradient enters m
    with the learning rate of that step as its weight. The learning rate comes from `LR`. The number
    r is the sum of these weights.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.999).
        eps: A small number that is added to the denominator. Default: 1e-15.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, LaProp, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), LaProp(), LR(4e-4))

    Reference:
        Ziyin et al., "LaProp: separating momentum and adaptivity in Adam", arXiv 2002.04839.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-15

    reads = ("lr",)
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        averages = {name: zeros_like_state(param) for name in ("exp_avg", "exp_avg_sq")}
        return {"rate": statistic(0.0, param), "mass": statistic(0.0, param), **averages}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        weight = (1 - beta1) * group["lr"]
        rate = state["rate"].mul_(beta1).add_(weight).stack()
        # the sum of weights in v, because 1 - β₂ᵗ would be wrong once a schedule changes β₂
        mass = state["mass"].mul_(beta2).add_(1 - beta2).stack()
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        u.div_(v.sqrt().div_(mass.sqrt()).add_(group["eps"]))
        m = state["exp_avg"].mul_(beta1).add_(u, alpha=weight)
        return u.copy_(m).div_(rate + (rate <= 0))  # m is 0 if all learning rates were 0
