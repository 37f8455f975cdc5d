"""Sign: only the direction of every entry."""

from __future__ import annotations

import torch

from torchzero_clip.core import Group, State, TensorList, Transform


class Sign(Transform):
    """u ← sign(u); NaN stays NaN

    After `EMA` it is Signum {identity: signum}.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Sign
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), EMA(0.9), Sign(), LR(1e-4))

    Reference:
        Bernstein et al., "signSGD", arXiv 1802.04434.
    """

    complex = "refuse"
    update_size = "ones"
    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = u.own()
        for t, wrong in zip(u, [torch.isnan(t) for t in u], strict=True):
            t.sign_().masked_fill_(wrong, torch.nan)
        return u
