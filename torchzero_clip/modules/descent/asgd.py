"""ASGD: gradient descent with steps that shrink, and the average of the weights on its way."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.state import statistic


class ASGD(Transform):
    """u ← η (u + lambd · w);   a ← a + μ (w - u - a);   η ← lr / (1 + lambd · lr · t)^alpha

    The weights' average a lies in `opt.state[p]["ASGD/ax"]`; it is the weights themselves until
    after step t0, and then their mean, μ = 1 / max(1, t - 1 - t0). Put it last.

    Args:
        lr: The first step size; the next ones follow it a step later.
        lambd: How much of the weights joins the gradient, and how fast steps shrink.
        alpha: The power of time with which they do.
        t0: The step from which weights are averaged.

    Example:
        >>> import torch
        >>> from torchzero_clip import ASGD, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ASGD(1e-2, t0=1000))

    Reference:
        Polyak, Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal on
        Control and Optimization 30 (1992).
    """

    lr: Live[NonNegative] = 1e-2
    lambd: Live[NonNegative] = 1e-4
    alpha: Live[NonNegative] = 0.75
    t0: Live[NonNegative] = 1e6

    leaves = "set"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {
            "step": counter(param),
            "eta": statistic(0.0, param),
            "ax": zeros_like_state(param),
        }

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        lr, lambd, w = group["lr"], group["lambd"], group["params"]
        t, eta = state["step"].add_(1).stack(), state["eta"]
        eta.add_((2 - t).clamp(min=0) * lr)  # the first is lr
        u = u.add_(w, alpha=lambd).mul_(eta.stack())
        state["ax"].lerp_(w.sub(u), 1 / (t - 1 - group["t0"]).clamp(min=1))
        eta.add_(lr / (1 + lambd * lr * t) ** group["alpha"] - eta.stack())
        return u
