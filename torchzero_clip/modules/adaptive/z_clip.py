"""ZClip: spikes of the norm, found by their z-score, cut to near the average."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Positive, Share
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion, blend, blend_squares, deviation
from torchzero_clip.modules.adaptive.z_stat import ZStat


class ZClip(AdaptiveRule):
    """z = (n - μ) / (σ + 1e-6);   if z > t: u ← u · (μ + σ t² / z) / n

    Then μ ← α μ + (1 - α) c and v ← α v + (1 - α)(c - μ)², c the norm after the cut, σ = √v.
    Since it observes what it cut, a lasting jump of the norm to a new level is never followed
    (except in mode "percentile"): every later norm is a spike. Where that may happen take
    `AutoClip`.

    Args:
        alpha: How much of the averages is kept a step.
        z_thresh: t, from which z on a norm is a spike.
        max_norm: A limit besides, from the first step on, or None. It is not observed.
        warmup_steps: How many norms the averages start from.
        mode: "adaptive" cuts to μ + σ t² / z, "mean" to μ, "percentile" to μ + σ t.
        skip_on_spike: Make the update of a spike zero.
        dim: What is measured together: "global", "group", "layer", or None for each tensor.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, ZClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ZClip(), Adam(), LR(1e-3))

    Reference:
        Kumar et al., "ZClip: adaptive spike mitigation for LLM pre-training", arXiv 2504.02507.
    """

    alpha: Live[Share] = 0.97
    z_thresh: Live[Positive] = 2.5
    max_norm: Live[NonNegative | None] = 1.0
    warmup_steps: int = 25
    mode: Literal["adaptive", "mean", "percentile"] = "adaptive"
    skip_on_spike: bool = False
    dim: Scope = "global"

    pure = True

    def judge(self) -> Criterion:
        return STATISTICS[self.mode]

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        limit = torch.as_tensor(super().limit(norm, state, group), device=norm.device)
        if self.skip_on_spike:
            limit = torch.where(norm > limit, torch.zeros_like(limit), limit)
        return limit if group["max_norm"] is None else limit.clamp(max=group["max_norm"])

    def seen(self, norm: Tensor, clipped: Tensor, state: UnitState, values: Group) -> Tensor:
        return torch.minimum(norm, self.judge().limit(norm, state, values))


class _ZClipStat(ZStat):
    """The averages of ZClip: population variance, μ first, then v against the new μ"""

    eps = 1e-6
    pure = True

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        return super().start(mean, var * ((count - 1) / count), count)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        mean = blend(state["mean"], norm, group["alpha"])
        return {
            "mean": mean,
            "std": blend_squares(state["std"], deviation(norm, mean), group["alpha"]),
        }


STATISTICS = {
    "adaptive": _ZClipStat(clipping="reciprocal"),
    "mean": _ZClipStat(clipping="mean"),
    "percentile": _ZClipStat(clipping="max"),
}
