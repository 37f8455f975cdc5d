"""GeometricQuantile: a limit that moves by a factor a step, towards a quantile of past norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Fraction, NonNegative
from torchzero_clip.modules.adaptive.criterion import Criterion, at_most, none_yet


class GeometricQuantile(Criterion):
    """Q ← Q · exp(rate · (q - [n ≤ Q]))

    Q settles where a share q of the norms is no larger, whatever their scale; from J times too high
    it is back after log J / (rate · (1 - q)) steps. It begins at the mean of the warm-up, or at the
    first norm.

    Args:
        q: Between 0 and 1.
        rate: How far Q moves a step, in terms of its logarithm.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaptiveClip, GeometricQuantile, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AdaptiveClip(GeometricQuantile(0.5))
        >>> opt = Modular(model.parameters(), clip, Momentum(0.9), LR(0.1))

    Reference:
        Andrew et al., "Differentially private learning with adaptive clipping", arXiv 1905.03871,
        without its noise.
    """

    q: Live[Fraction] = 0.5
    rate: Live[NonNegative] = 0.2

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"quantile": 0.0}

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        return {"quantile": mean}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return none_yet(state["quantile"], state["quantile"])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        quantile = state["quantile"]
        share = group["q"] - at_most(norm, quantile).to(norm.dtype)
        moved = quantile * (group["rate"] * share).exp()
        return {"quantile": torch.where(quantile > 0, moved, norm)}
