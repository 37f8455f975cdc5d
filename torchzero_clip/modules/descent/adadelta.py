"""Adadelta: a rule that computes the step size from past steps."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share


class Adadelta(Transform):
    """Adadelta: scales gradients so that each step is as large as the average past step.

    You need not tune a learning rate. Use `Adadelta` with `LR(1.0)`.

    v ← ρ v + (1 - ρ) u²;   u ← u √(d + eps) / √(v + eps);   d ← ρ d + (1 - ρ) u²

    Here v is the average of squared gradients and d the average of squared steps.

    Args:
        rho: The decay rate of the averages v and d. Default: 0.9.
        eps: A small number that is added to both averages. The size of the first step is about
            √eps. Default: 1e-6.

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
        rho = group["rho"]
        eps = group["eps"]
        d = state["acc_delta"]
        v = state["square_avg"].mul_(rho).addcmul_(u, u, 1 - rho)
        u.mul_(d.add(eps).sqrt_().div_(v.add(eps).sqrt_()))
        d.mul_(rho).addcmul_(u, u, 1 - rho)
        return u
