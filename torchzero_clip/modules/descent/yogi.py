"""Yogi: Adam whose second moment takes small steps."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.descent.adagrad import filled_like_state


class Yogi(Transform):
    """m ← β₁ m + (1 - β₁) u;   v ← v - (1 - β₂) sign(v - u²) u²;   u ← m̂ / (√v̂ + eps)

    m̂ and v̂ are debiased as those of `Adam` are.

    Args:
        betas: How much of m is kept a step, and 1 less the share of u² by which v moves.
        eps: Added to the denominator.
        initial_accumulator: Where m and v start.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Yogi
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Yogi(), LR(1e-2))

    Reference:
        Zaheer et al., "Adaptive methods for nonconvex optimization", NeurIPS 2018.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[NonNegative] = 1e-3
    initial_accumulator: NonNegative = 1e-6

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        names, start = ("exp_avg", "exp_avg_sq"), self.initial_accumulator
        filled = {name: filled_like_state(param, start) for name in names}
        return {"step": counter(param), **filled}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t, v = state["step"].add_(1).stack(), state["exp_avg_sq"]
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        square = u.mul(u)
        v.addcmul_(v.sub(square).sign_(), square, beta2 - 1)
        root = u.copy_(v).sqrt_().div_((1 - beta2**t).sqrt()).add_(group["eps"])
        return root.div_(m).reciprocal_().div_(1 - beta1**t)
