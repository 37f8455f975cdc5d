"""Yogi: Adam with a limit on how fast the second moment changes."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.descent.adagrad import filled_like_state


class Yogi(Transform):
    """Yogi: Adam that limits how much the second moment changes per step.

    Use it if the gradients are sparse or noisy. Unlike in `Adam`, v does not fall quickly after a
    large gradient.

    m ← β₁ m + (1 - β₁) u;   v ← v - (1 - β₂) sign(v - u²) u²;   u ← m̂ / (√v̂ + eps)

    Here m̂ and v̂ are m and v with bias correction, as in `Adam`.

    Args:
        betas: β₁ is the decay rate of the average m. β₂ sets the change of v per step, (1 - β₂) u².
            Default: (0.9, 0.999).
        eps: A small number that is added to the denominator. Default: 1e-3.
        initial_accumulator: The first value of m and v. Default: 1e-6.

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
        start = self.initial_accumulator
        averages = {name: filled_like_state(param, start) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": counter(param), **averages}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        t = state["step"].add_(1).stack()
        v = state["exp_avg_sq"]
        m = state["exp_avg"].lerp_(u, 1 - beta1)
        square = u.mul(u)
        v.addcmul_(v.sub(square).sign_(), square, beta2 - 1)
        # the denominator goes into the memory of u, which saves a temporary tensor
        root = u.copy_(v).sqrt_().div_((1 - beta2**t).sqrt()).add_(group["eps"])
        return root.div_(m).reciprocal_().div_(1 - beta1**t)
