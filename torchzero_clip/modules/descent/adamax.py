"""Adamax: momentum divided by the largest recent magnitude."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of


class Adamax(Transform):
    """Adamax: Adam with the largest recent magnitude in place of the second moment.

    m ← β₁ m + (1 - β₁) u;   s ← max(β₂ s, |u| + eps);   u ← m / ((1 - β₁ᵗ) s)

    Here t is the step number of each parameter.

    Args:
        betas: The decay rate of the average m, and the factor by which s falls per step.
            Default: (0.9, 0.999).
        eps: A small number that is added to |u|, so that s is above zero. Default: 1e-8.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adamax, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adamax(), LR(2e-3))

    Reference:
        Kingma, Ba, "Adam: a method for stochastic optimization", arXiv 1412.6980, section 7.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-8

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_inf")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        largest = state["exp_inf"].mul_(beta2).maximum_(u.abs().add_(group["eps"]))
        # the result is computed in the memory of u, which saves a temporary tensor
        return u.copy_(largest).div_(m).reciprocal_().div_(1 - beta1**t)
