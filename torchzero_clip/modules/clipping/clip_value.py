"""ClipValue: every entry within ±value."""

from __future__ import annotations

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.traits import Bounding


class ClipValue(Transform, Bounding):
    """u ← min(max(u, -value), value)

    Args:
        value: The largest magnitude an entry may have. NaN stays NaN.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipValue, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipValue(0.5), Momentum(0.9), LR(1e-2))
    """

    value: Live[NonNegative]

    complex = "refuse"
    largest_entry = "value"
    per_entry = True
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.clamp_(-group["value"], group["value"])
