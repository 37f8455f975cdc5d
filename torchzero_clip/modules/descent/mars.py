"""Mars: the gradient with the noise of its last change taken off."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share


class Mars(Transform):
    """u ← u + gamma · beta / (1 - beta) · (u - p);   p ← u as it came

    p is the gradient of the step before, zero at first. `ClipNorm(1.0)` after it, then Adam with
    the same beta, is MARS-AdamW.

    Args:
        beta: How much of its average the optimizer after this link keeps a step; None as the first
            of `betas` of the nearest link that has some, as `Adam`.
        gamma: How much of the correction is made; 0 for none.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Mars, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> mars = Mars(), ClipNorm(1.0), Adam((0.95, 0.99))
        >>> opt = Modular(model.parameters(), *mars, WeightDecay(0.01), LR(3e-3))

    Reference:
        Yuan et al., "MARS: unleashing the power of variance reduction for training large models",
        arXiv 2411.10438.
    """

    beta: Live[Share | None] = 0.95
    gamma: Live[NonNegative] = 0.025

    borrows = (("beta", "betas", 0),)
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"previous": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        previous, weight = state["previous"], group["gamma"] * group["beta"] / (1 - group["beta"])
        change = u.sub(previous)
        previous.copy_(u)
        return u.add_(change, alpha=weight)
