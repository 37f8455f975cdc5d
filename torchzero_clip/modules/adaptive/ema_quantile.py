"""EMAQuantile: a criterion whose limit moves toward a quantile of past norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Fraction, Share
from torchzero_clip.modules.adaptive.criterion import Criterion, below, blend, none_yet


class EMAQuantile(Criterion):
    """A running estimate of a quantile of past norms, as the limit.

    Use it if the norms change slowly over a run. The limit can rise and fall.

    s ← α s + (1 - α)|n - Q|;   Q ← Q + (1 - α) · s · (q - [n < Q])

    Here n is the norm of the step, Q is the limit, and [n < Q] is 1 if n is below Q and 0 if not. Q
    converges to a value such that a fraction q of the norms is below Q. If many spikes have raised
    Q by a factor J, Q returns to its old value after log J / ((1 - α)(1 - q)) steps.

    Args:
        q: The quantile, from 0 to 1.
        alpha: The decay rate of s. Q moves by a multiple of 1 - α. Default: 0.99.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, EMAQuantile, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaptiveClip(EMAQuantile(0.95)), Adam(), LR(1e-3))
    """

    q: Live[Fraction]
    alpha: Live[Share] = 0.99

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"quantile": 0.0, "spread": 0.0, "seen": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return none_yet(state["quantile"], state["quantile"])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        quantile = state["quantile"]
        is_first = state["seen"] == 0
        spread = blend(state["spread"], (norm - quantile).abs(), group["alpha"])
        share = group["q"] - below(norm, quantile).to(norm.dtype)
        moved = (quantile + (1 - group["alpha"]) * spread * share).clamp(min=0)
        return {
            "quantile": torch.where(is_first, norm, moved),
            "spread": torch.where(is_first, torch.zeros_like(spread), spread),
            "seen": torch.ones_like(state["seen"]),
        }
