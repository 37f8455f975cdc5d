"""AdaBelief: Adam that divides by the deviation of the gradients from their average."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of
from torchzero_clip.modules.descent.radam import rectified


class AdaBelief(Transform):
    """AdaBelief: Adam that divides by the deviation of the gradients from their average.

    If gradients are close to their average, steps are longer than with `Adam`. Otherwise steps are
    shorter.

    m ← β₁ m + (1 - β₁) u;   s ← β₂ s + (1 - β₂)(u - m)² + eps;   u ← m̂ / (√ŝ + eps)

    Here m̂ and ŝ are m and s with bias correction.

    Args:
        betas: The decay rates of the averages m and s. Default: (0.9, 0.999).
        eps: A small number that is added to s in every step. It is also added to the denominator.
            Default: 1e-16.
        rectify: If True, steps use momentum without division until s is reliable, as in `RAdam`.
            Default: True.

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
        beta1, beta2 = group["betas"]
        eps = group["eps"]
        t = state["step"].add_(1).stack()
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        # the memory of u holds the deviation, then the denominator, which saves temporary tensors
        u.sub_(m)
        s = state["exp_avg_var"].mul_(beta2).addcmul_(u, u, 1 - beta2).add_(eps)
        root = u.copy_(s).sqrt_()
        if self.rectify:
            return rectified(m, root.add_(eps), t, group["betas"])
        root.div_((1 - beta2**t).sqrt()).add_(eps)
        return root.div_(m).reciprocal_().div_(1 - beta1**t)
