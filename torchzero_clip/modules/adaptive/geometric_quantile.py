"""GeometricQuantile: a criterion whose limit is multiplied by a factor in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Fraction, NonNegative
from torchzero_clip.modules.adaptive.criterion import Criterion, at_most, none_yet


class GeometricQuantile(Criterion):
    """A running estimate of a quantile, as the limit. Each step scales the estimate.

    Use it if the scale of the norms is unknown. The speed of the limit does not depend on the
    scale.

    Q ← Q · exp(rate · (q - [n ≤ Q]))

    Here n is the norm of the step, Q is the limit, and [n ≤ Q] is 1 if n is at most Q and 0 if not.
    Q starts at the mean of the warm-up, or at the first norm. Q converges to a value such that a
    fraction q of the norms is at most Q. If Q is too high by a factor J, Q returns after
    log J / (rate · (1 - q)) steps.

    Args:
        q: The quantile, from 0 to 1. Default: 0.5.
        rate: The speed. Per step, log Q changes by at most `rate`. Default: 0.2.

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
