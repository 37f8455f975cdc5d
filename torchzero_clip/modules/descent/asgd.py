"""ASGD: gradient descent with shrinking steps that also averages the weights."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Threshold
from torchzero_clip.core.state import statistic


class ASGD(Transform):
    """Averaged SGD: gradient descent with shrinking steps that also averages the weights.

    Put it last, in place of `LR`, because `ASGD` has its own learning rate.

    u ← η (u + lambd · w);   a ← a + μ (w - u - a);   η ← lr / (1 + lambd · lr · t)^alpha

    The average a is stored in `opt.state[p]["ASGD/ax"]`. Up to step t0 the average is equal to the
    weights. After that, the average is the mean of the weights since step t0, with
    μ = 1 / max(1, t - 1 - t0).

    Args:
        lr: The first step size. If you change `lr`, the change acts one step later. Default: 1e-2.
        lambd: The factor of the weights that are added to the gradient. It also sets how fast the
            steps shrink. Default: 1e-4.
        alpha: The exponent in the formula of η. A larger exponent shrinks the steps faster.
            Default: 0.75.
        t0: The step after which averaging starts. With `math.inf`, it never starts. Default: 1e6.

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
    t0: Live[Threshold] = 1e6

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
        lr = group["lr"]
        lambd = group["lambd"]
        w = group["params"]
        eta = state["eta"]
        t = state["step"].add_(1).stack()
        eta.add_((2 - t).clamp(min=0) * lr)  # η is lr in the first step
        u = u.add_(w, alpha=lambd).mul_(eta.stack())
        state["ax"].lerp_(w.sub(u), 1 / (t - 1 - group["t0"]).clamp(min=1))
        eta.add_(lr / (1 + lambd * lr * t) ** group["alpha"] - eta.stack())
        return u
