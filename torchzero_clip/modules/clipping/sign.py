"""Sign: only the direction of every entry."""

from __future__ import annotations

import math

from torchzero_clip.core import Group, State, TensorList, Transform
from torchzero_clip.core.traits import Bounding


class Sign(Transform, Bounding):
    """u ← sign(u); NaN stays NaN

    After `EMA` it is Signum (tested against pytorch_optimizer).

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
        wrong = u.isnan()
        return u.own().sign_().masked_fill_(wrong, math.nan)
