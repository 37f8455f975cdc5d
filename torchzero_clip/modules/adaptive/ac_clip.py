"""ACClip: a moving average, each entry at most the usual size of its gradients."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import Positive, Share


class ACClip(Transform):
    """u ← m · min(1, τ / (|m| + eps));   m ← β₁ m + (1 - β₁) u,   τ ← β₂ τ + (1 - β₂) |u|

    Adaptive coordinate-wise clipping, for gradients with heavy tails: τ is the threshold of each
    entry, the average size of its gradients, this one included. An entry that is NaN or infinite
    leaves its averages as they were.

    Args:
        betas: How much of the two averages is kept a step.
        eps: Added to |m|.

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
        (beta1, beta2), finite = group["betas"], u.isfinite()
        m = state["exp_avg"].lerp(u, 1 - beta1)
        size = state["exp_avg_abs"].lerp(u.abs(), 1 - beta2)
        state["exp_avg"].copy_(m.where(finite, state["exp_avg"]))
        state["exp_avg_abs"].copy_(size.where(finite, state["exp_avg_abs"]))
        return size.div_(m.abs().add_(group["eps"])).minimum_(1.0).mul_(m)
