"""Sign: a rule that keeps only the sign of every element."""

from __future__ import annotations

import math

from torchzero_clip.core import Group, State, TensorList, Transform
from torchzero_clip.core.traits import Bounding


class Sign(Transform, Bounding):
    """Sign descent: every element of the update becomes 1, -1 or 0.

    All weights change by the same amount per step, so the learning rate must be small, as with
    `Adam`.

    u ← sign(u); NaN stays NaN

    `Sign` after `EMA` is the method Signum (tested against pytorch_optimizer).

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Sign
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), EMA(0.9), Sign(), LR(1e-4))

    Reference:
        Bernstein et al., "signSGD", arXiv 1802.04434.
    """

    complex = "refuse"
    leaves = "ones"
    largest_entry = 1.0
    per_entry = True
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        is_nan = u.isnan()  # torch.sign gives 0 for NaN
        return u.own().sign_().masked_fill_(is_nan, math.nan)
