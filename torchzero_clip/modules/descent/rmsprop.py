"""RMSprop: the update over the root of its mean square."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.descent.momentum import check_momentum


class RMSprop(Transform):
    """v ← α v + (1 - α) u²;   u ← u / (√v + eps)

    With `centered`, v loses the square of the average of u, so that it is a variance.

    Args:
        alpha: How much of the averages is kept a step; None as `beta` of the nearest link that has
            one, as `EMA`.
        eps: Added to the denominator.
        momentum: Above zero, the result runs through b ← momentum · b + u as in torch. For a
            momentum that can be scheduled put the link `Momentum` after this one instead.
        centered: Divide by the standard deviation.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, RMSprop
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), RMSprop(), LR(1e-2))

    Reference:
        Hinton, "Neural networks for machine learning", lecture 6e; Graves, arXiv 1308.0850.
    """

    alpha: Live[Share | None] = 0.99
    eps: Live[NonNegative] = 1e-8
    momentum: float = 0.0
    centered: bool = False

    borrows = (("alpha", "beta", None),)
    leaves = "ones"
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        check_momentum(self)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        names = ["square_avg"] + ["grad_avg"] * self.centered
        names += ["momentum_buffer"] if self.momentum else []
        return {name: zeros_like_state(param) for name in names}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        alpha = group["alpha"]
        v = state["square_avg"].mul_(alpha).addcmul_(u, u, 1 - alpha)
        if self.centered:
            mean = state["grad_avg"].lerp_(u, 1 - alpha)
            v = v.borrow().addcmul_(mean, mean, -1)
        u.div_(v.sqrt().add_(group["eps"]))
        return state["momentum_buffer"].mul_(self.momentum).add_(u) if self.momentum else u
