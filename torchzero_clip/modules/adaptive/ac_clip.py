"""ACClip: a rule that limits each element of a momentum to the usual size of its gradients."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import Positive, Share


class ACClip(Transform):
    """Adaptive coordinate-wise clipping: momentum with an adaptive limit for every element.

    Use it in place of momentum if the gradients have heavy tails.

    m ← β₁ m + (1 - β₁) u,   τ ← β₂ τ + (1 - β₂) |u|;   u ← m · min(1, τ / (|m| + eps))

    The limit τ of an element is the average magnitude of the gradients of this element. The average
    includes the current gradient. If an element is NaN or infinite, the averages m and τ of the
    element do not change.

    Args:
        betas: The decay rates of the averages m and τ. Default: (0.9, 0.99).
        eps: A small number that is added to |m|. Default: 1e-5.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ACClip, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ACClip(), LR(1e-3))

    Reference:
        Zhang et al., "Why are adaptive methods good for attention models?", arXiv 1912.03194, with
        α = 1.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.99)
    eps: Live[Positive] = 1e-5

    complex = "refuse"
    per_entry = True
    state_kinds = {"exp_avg": "linear"}
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like_state(param), "exp_avg_abs": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        finite = u.isfinite()
        m = state["exp_avg"].lerp(u, 1 - beta1)
        tau = state["exp_avg_abs"].lerp(u.abs(), 1 - beta2)
        state["exp_avg"].copy_(m.where(finite, state["exp_avg"]))
        state["exp_avg_abs"].copy_(tau.where(finite, state["exp_avg_abs"]))
        return tau.div_(m.abs().add_(group["eps"])).minimum_(1.0).mul_(m)
