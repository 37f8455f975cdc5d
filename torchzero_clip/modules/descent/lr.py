"""LR: the learning rate."""

from __future__ import annotations

from typing import Any

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative


class LR(Transform):
    """The learning rate: multiplies the update by `lr`.

    `LR` is usually the last link. The value is stored in `param_groups` under "lr", so all
    schedulers of torch work. Only one link of a chain may have a hyperparameter `lr`.

    u ← lr · u

    Args:
        lr: The learning rate.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), LR(0.1))
    """

    lr: Live[NonNegative]

    leaves = "set"
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["lr"])

    def affine(self, group: Group) -> tuple[Any, Any]:
        return group["lr"], 0.0
