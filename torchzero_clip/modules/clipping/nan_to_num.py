"""NanToNum: a rule that replaces NaN and infinity."""

from __future__ import annotations

import math

from torchzero_clip.core import Group, Live, State, TensorList, Transform
from torchzero_clip.core.bounds import Finite


class NanToNum(Transform):
    """Replacement of NaN, +inf and -inf in the update, by default with zeros.

    This rule hides NaN gradients. Prefer `Guard`, which skips a step with NaN gradients.

    u ← u with NaN, +inf and -inf replaced

    Args:
        nan: The value that replaces NaN. Default: 0.0.
        posinf: The value that replaces +inf. `math.inf` keeps +inf. Default: 0.0.
        neginf: The value that replaces -inf. `-math.inf` keeps -inf. Default: 0.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, NanToNum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), NanToNum(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    nan: Live[Finite] = 0.0
    posinf: Live[float] = 0.0
    neginf: Live[float] = 0.0

    per_entry = True
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = u.own().masked_fill_(u.isnan(), group["nan"])
        u = u.masked_fill_(u.eq(math.inf), group["posinf"])
        return u.masked_fill_(u.eq(-math.inf), group["neginf"])
