"""ClipValue: a rule that limits every element."""

from __future__ import annotations

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Threshold
from torchzero_clip.core.traits import Bounding


class ClipValue(Transform, Bounding):
    """Value clipping: limits every element of the update to the range from `-value` to `value`.

    Use it if single elements explode. Unlike `ClipNorm`, it changes the direction of the update.

    u ← min(max(u, -value), value)

    NaN stays NaN.

    Args:
        value: The largest magnitude of an element.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipValue, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipValue(0.5), Momentum(0.9), LR(1e-2))
    """

    value: Live[Threshold]

    complex = "refuse"
    largest_entry = "value"
    per_entry = True
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.clamp_(-group["value"], group["value"])
