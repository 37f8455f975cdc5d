"""Quantile: a criterion whose limit is a quantile of the norms in a window."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Count, Fraction
from torchzero_clip.modules.adaptive.criterion import Criterion, none_yet


class Quantile(Criterion):
    """A quantile of the last `window` norms, interpolated linearly, as the limit.

    Use it if the limit must forget a spike completely. A spike leaves the window after `window`
    steps.

    Args:
        q: The quantile, from 0 to 1.
        window: The number of norms in the window. Default: 1024.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, Quantile
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaptiveClip(Quantile(0.95)), Adam(), LR(1e-3))
    """

    q: Live[Fraction]
    window: Count = 1024

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"norms": torch.full((self.window,), math.nan, dtype=torch.float32, device="cpu")}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        q = group["q"]
        q = q.to(state["norms"]) if isinstance(q, Tensor) else q
        limit = torch.nanquantile(state["norms"], q, dim=-1)
        return none_yet(limit, limit)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        norms = state["norms"]
        return {"norms": torch.cat([norms[:, 1:], norm.to(norms.dtype).unsqueeze(1)], dim=1)}
