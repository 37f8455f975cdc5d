"""RAdam: Adam that uses only momentum until the second moment is reliable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of


class RAdam(Transform):
    """RAdam: Adam that needs no warm-up. The first steps use momentum without division.

    u ← r m̂ √(1 - β₂ᵗ) / (√v + eps);   m̂ while ρ ≤ 5

    Here m̂ and v are the averages of `Adam`, and t is the step number. The effective number of
    gradients in v is ρ = ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ), with ρ∞ = 2 / (1 - β₂) - 1. The factor r is
    √((ρ - 4)(ρ - 2) ρ∞ / ((ρ∞ - 4)(ρ∞ - 2) ρ)).

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.999).
        eps: A small number that is added to √v, before bias correction. Default: 1e-8.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, RAdam
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), RAdam(), LR(1e-3))

    Reference:
        Liu et al., "On the variance of the adaptive learning rate and beyond", arXiv 1908.03265.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-8

    state_kinds = {"exp_avg": "linear", "exp_avg_sq": "squares"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_sq")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(u, u, 1 - beta2)
        # the root goes into the memory of u, which saves a temporary tensor
        root = u.copy_(v).sqrt_().add_(group["eps"])
        return rectified(m, root, t, group["betas"])


def rectified(m: TensorList, root: TensorList, t: Tensor, betas: Any) -> TensorList:
    """Return the direction of step t.

    `root` must contain √v + eps. The function overwrites `root`.
    """
    beta1, beta2 = betas
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    r = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    share = torch.where(length > 5, ((1 - beta2**t) * r) ** -0.5, 0)
    root.mul_(share).add_((length <= 5).to(t.dtype))
    return root.div_(m).reciprocal_().div_(1 - beta1**t)
