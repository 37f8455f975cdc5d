"""RMSprop: a rule that divides each gradient by the root of its average square."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.descent.momentum import check_momentum


class RMSprop(Transform):
    """RMSprop: divides each gradient element by the root of its average square.

    Use it, for example, in reinforcement learning. `Adam` is this rule with momentum and bias
    correction.

    v ← α v + (1 - α) u²;   u ← u / (√v + eps)

    With `centered=True`, the rule also averages u, and subtracts the square of this average from v.
    Then v is a variance.

    Args:
        alpha: The decay rate of the averages. None uses `beta` of the nearest link that has `beta`,
            such as `EMA`. Default: 0.99.
        eps: A small number that is added to the denominator. Default: 1e-8.
        momentum: If above 0, the result is the running sum b ← momentum · b + u, as in torch. To
            schedule the momentum, use `Momentum` after this link instead. Default: 0.0.
        centered: If True, divide by the standard deviation of the gradient. Default: False.

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
    momentum: NonNegative = 0.0
    centered: bool = False

    borrows = (("alpha", "beta", None),)
    leaves = "ones"
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        check_momentum(self)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        names = ["square_avg"]
        if self.centered:
            names.append("grad_avg")
        if self.momentum:
            names.append("momentum_buffer")
        return {name: zeros_like_state(param) for name in names}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        alpha = group["alpha"]
        v = state["square_avg"].mul_(alpha).addcmul_(u, u, 1 - alpha)
        if self.centered:
            mean = state["grad_avg"].lerp_(u, 1 - alpha)
            v = v.borrow().addcmul_(mean, mean, -1)
        u.div_(v.sqrt().add_(group["eps"]))
        return state["momentum_buffer"].mul_(self.momentum).add_(u) if self.momentum else u
