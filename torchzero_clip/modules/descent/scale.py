"""Scale: a rule that multiplies the update by a factor."""

from __future__ import annotations

from typing import Any

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Finite


class Scale(Transform):
    """Scale multiplies the update by a constant factor.

    `Scale(-1)` as the first link maximizes the loss. If the chain contains a rule that reads the
    gradients, such as `Cautious`, use `Scale(-1, target="grad")`.

    u ← factor · u

    Args:
        factor: The factor, any finite number.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Scale
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Scale(-1), Adam(), LR(1e-3))
    """

    factor: Live[Finite]

    leaves = "set"
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["factor"])

    def affine(self, group: Group) -> tuple[Any, Any]:
        return group["factor"], 0.0
