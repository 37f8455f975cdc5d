"""Adadelta: steps as large as the last steps were, for gradients as large as the last ones."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share


class Adadelta(Transform):
    """v ← ρ v + (1 - ρ) u²;   u ← u √(d + eps) / √(v + eps);   d ← ρ d + (1 - ρ) u²

    Args:
        rho: How much of the averages v and d is kept a step.
        eps: Added to both; its root is about how far the first step goes.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adadelta, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adadelta(), LR(1.0))

    Reference:
        Zeiler, "Adadelta: an adaptive learning rate method", arXiv 1212.5701.
    """

    rho: Live[Share] = 0.9
    eps: Live[NonNegative] = 1e-6

    leaves = "own"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {name: zeros_like_state(param) for name in ("square_avg", "acc_delta")}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        rho, eps, moved = group["rho"], group["eps"], state["acc_delta"]
        v = state["square_avg"].mul_(rho).addcmul_(u, u, 1 - rho)
        u.mul_(moved.add(eps).sqrt_().div_(v.add(eps).sqrt_()))
        moved.mul_(rho).addcmul_(u, u, 1 - rho)
        return u
