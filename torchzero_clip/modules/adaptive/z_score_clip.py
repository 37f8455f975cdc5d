"""ZScoreClip: a limit at the average plus zmax deviations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion, blend, none_yet


class ZScoreClip(AdaptiveRule):
    """u ← u · min(1, (m + zmax · √v) / ‖u‖), m and v the running mean and variance of the raw norms

    Raw norms are observed, so a spike widens the limit for a while: its share of v falls by the
    factor ema_decay a step. While v is zero, up to the rounding of m, there is no limit.

    Args:
        zmax: How many deviations above the mean a norm may be.
        ema_decay: How much of m and v is kept a step.
        warmup_steps: How many norms are only observed first.
        dim: What is measured together: "global", "group", "layer", or None for each tensor.
        warmup: A rule that clips meanwhile, such as ClipNorm(1.0, dim="global"), or None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, ZScoreClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ZScoreClip(), Adam(), LR(1e-3))
    """

    zmax: Live[NonNegative] = 3.0
    ema_decay: Live[Share] = 0.99
    warmup_steps: int = 20
    dim: Scope = "global"
    warmup: NormRule | None = None

    pure = True

    def judge(self) -> Criterion:
        return SCORE


class _Score(Criterion):
    """m + zmax · √v, both averages from the first norm on"""

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"mean": 0.0, "std": 0.0, "seen": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        std = state["std"]
        return none_yet(state["mean"] + group["zmax"] * std, std, state["mean"])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        mean, std, first = state["mean"], state["std"], state["seen"] == 0
        decay = group["ema_decay"]
        var = decay * (std**2 + (1 - decay) * (norm - mean) ** 2)  # EMA of n² minus square of m
        return {
            "mean": torch.where(first, norm, blend(mean, norm, decay)),
            "std": torch.where(first, torch.zeros_like(std), var.sqrt()),
            "seen": torch.ones_like(state["seen"]),
        }


SCORE = _Score()
