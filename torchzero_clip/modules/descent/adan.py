"""Adan: Adam with a third average, the average change of the gradient."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of


class Adan(Transform):
    """Adan: Adam with a third average: the average change from one gradient to the next.

    The average change helps to predict the next gradient. Nesterov momentum does the same. The
    state has two more tensors per parameter than the state of `Adam`.

    u ← (m̂ + β₂ d̂) / (√n̂ + eps);   m, d and n average u, u - p and (u + β₂ (u - p))²

    Here p is the gradient of the previous step. In the first step the change u - p is 0. The
    averages m̂, d̂ and n̂ have bias correction.

    Args:
        betas: The decay rates of the averages m, d and n. Default: (0.98, 0.92, 0.99).
        eps: A small number that is added to the denominator. Default: 1e-8.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adan, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adan(), WeightDecay(0.02), LR(1e-3))

    Reference:
        Xie et al., "Adan: adaptive Nesterov momentum algorithm for faster optimizing deep models",
        arXiv 2208.06677.
    """

    betas: Live[tuple[Share, Share, Share]] = (0.98, 0.92, 0.99)
    eps: Live[NonNegative] = 1e-8

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_diff", "exp_avg_sq", "previous")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2, beta3 = group["betas"]
        t = state["step"].add_(1).stack()
        change = u.sub(state["previous"]).mul_((t - 1).clamp(max=1))
        state["previous"].copy_(u)
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        d = state["exp_avg_diff"].lerp_(change, 1 - beta2)
        # the memory of u holds u + β₂ (u - p), then the denominator, which saves temporary tensors
        u.add_(change, alpha=beta2)
        n = state["exp_avg_sq"].mul_(beta3).addcmul_(u, u, 1 - beta3)
        root = u.copy_(n).sqrt_().div_((1 - beta3**t).sqrt()).add_(group["eps"])
        ahead = m.div(1 - beta1**t).add_(d, alpha=beta2 / (1 - beta2**t))
        return root.div_(ahead).reciprocal_()
