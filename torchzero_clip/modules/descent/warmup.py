"""Warmup: a linear warm-up of the update."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import Count


class Warmup(Transform):
    """Linear warm-up: scales the update up from 1 / `steps` to its full size.

    Unlike a warm-up of the learning rate, this rule counts the steps of each parameter. A parameter
    that you unfreeze later therefore has its own warm-up.

    u ← u · min(1, t / steps)

    Here t is the step number of each parameter, counted from 1.

    Args:
        steps: The step in which the update reaches its full size.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Warmup
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), Warmup(100))
    """

    steps: Live[Count]

    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        share = (state["step"].add_(1).stack() / group["steps"]).clamp(max=1)
        return u.mul_(share)
