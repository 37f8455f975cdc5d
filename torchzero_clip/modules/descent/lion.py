"""Lion: the sign of momentum."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import Share
from torchzero_clip.core.traits import Bounding


class Lion(Transform, Bounding):
    """Lion: the sign of an interpolation between the momentum and the gradient.

    `Lion` needs half as much state as `Adam`. Use a learning rate that is 3 to 10 times smaller
    than for `Adam`, and a larger weight decay.

    u ← sign(β₁ m + (1 - β₁) u);   m ← β₂ m + (1 - β₂) u

    Args:
        betas: The weight of m in the interpolation, and the decay rate of m. Default: (0.9, 0.99).

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Lion, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Lion(), WeightDecay(0.1), LR(1e-4))

    Reference:
        Chen et al., "Symbolic discovery of optimization algorithms", arXiv 2302.06675.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.99)

    state_kinds = {"exp_avg": "linear"}
    leaves = "ones"
    largest_entry = 1.0
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        beta1, beta2 = group["betas"]
        m = state["exp_avg"]
        direction = m.lerp(u, 1 - beta1).sign_()
        m.lerp_(u, 1 - beta2)
        return direction
