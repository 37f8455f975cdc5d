"""ZScoreClip: a rule that limits the norm to the average plus `zmax` deviations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import Share, Threshold
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion, blend, none_yet


class ZScoreClip(AdaptiveRule):
    """Norm clipping without a threshold: the limit is the mean plus `zmax` standard deviations.

    `ZScoreClip` observes raw norms (before clipping), so the limit follows a lasting change of the
    norm. A spike raises the limit for a while. The contribution of the spike to the variance falls
    by the factor `ema_decay` per step.

    u ← u · min(1, (m + zmax · √v) / ‖u‖), m and v the running mean and variance of the raw norms

    As long as v is zero, up to the rounding of m, there is no limit.

    Args:
        zmax: The number of standard deviations above the mean that a norm may have. Default: 3.0.
        ema_decay: The decay rate of m and v. Default: 0.99.
        warmup_steps: The number of norms that the rule observes before it clips. Default: 20.
        dim: The tensors that share one norm: "global", "group", "layer", or None for a separate
            norm per tensor. Default: "global".
        warmup: The rule that clips during the warm-up, such as `ClipNorm(1.0, dim="global")`, or
            None for no clipping. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, ZScoreClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ZScoreClip(), Adam(), LR(1e-3))
    """

    zmax: Live[Threshold] = 3.0
    ema_decay: Live[Share] = 0.99
    warmup_steps: int = 20
    dim: Scope = "global"
    warmup: NormRule | None = None

    pure = True

    def judge(self) -> Criterion:
        return SCORE


class _Score(Criterion):
    """The mean plus `zmax` standard deviations. Both averages start at the first norm."""

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"mean": 0.0, "std": 0.0, "seen": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        std = state["std"]
        return none_yet(state["mean"] + group["zmax"] * std, std, state["mean"])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        mean = state["mean"]
        std = state["std"]
        is_first = state["seen"] == 0
        decay = group["ema_decay"]
        # the average of n² minus the square of the average of n, without cancellation
        var = decay * (std**2 + (1 - decay) * (norm - mean) ** 2)
        return {
            "mean": torch.where(is_first, norm, blend(mean, norm, decay)),
            "std": torch.where(is_first, torch.zeros_like(std), var.sqrt()),
            "seen": torch.ones_like(state["seen"]),
        }


SCORE = _Score()
