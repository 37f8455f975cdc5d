"""Grokfast: the gradient plus its slow average."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.core.state import averages_of


class Grokfast(Transform):
    """Grokfast: adds the slow average of the gradients to the gradient.

    Put it before an optimizer such as `Adam`. Use it for grokking: tasks in which a model
    generalizes long after it has fitted the training data.

    m ← alpha · m + (1 - alpha) u, at first u;   u ← u + lamb · m

    Args:
        alpha: The decay rate of the average m. Default: 0.98.
        lamb: The weight of the average. Default: 2.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Grokfast, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Grokfast(), Adam(), LR(1e-3))

    Reference:
        Lee et al., "Grokfast: accelerated grokking by amplifying slow gradients", arXiv 2405.20233.
    """

    alpha: Live[Share] = 0.98
    lamb: Live[NonNegative] = 2.0

    state_kinds = {"ema": "linear"}
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "ema")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        later = state["step"].add_(1).minimum_(2).sub(1).stack()  # 0 in the first step, then 1
        slow = state["ema"].lerp_(u, 1 - group["alpha"] * later)
        return u.add_(slow, alpha=group["lamb"])
