"""Mars: a rule that reduces the noise of gradients by adding their change from step to step."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share


class Mars(Transform):
    """MARS: variance reduction that adds a multiple of the change of the gradient.

    Put it before an optimizer. The chain of `Mars`, `ClipNorm(1.0)` and `Adam` with the same beta
    is the paper's method MARS-AdamW.

    u ← u + gamma · beta / (1 - beta) · (u - p);   p ← u as it came

    Here p is the gradient of the previous step. In the first step, p is zero.

    Args:
        beta: The decay rate of the momentum in the optimizer after this link. None uses the first
            value of `betas` of the nearest link that has `betas`, such as `Adam`. Default: 0.95.
        gamma: The strength of the correction. 0 gives no correction. Default: 0.025.

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
        previous = state["previous"]
        weight = group["gamma"] * group["beta"] / (1 - group["beta"])
        change = u.sub(previous)
        previous.copy_(u)
        return u.add_(change, alpha=weight)
