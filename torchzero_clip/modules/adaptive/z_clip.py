"""ZClip: a rule that finds spikes of the norm by z-score."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, Scope, UnitState
from torchzero_clip.core.bounds import AboveZero, Share, Threshold
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion, blend, blend_squares, deviation
from torchzero_clip.modules.adaptive.z_stat import ZStat


class ZClip(AdaptiveRule):
    """Norm clipping against loss spikes: finds spikes of the norm by z-score and scales them down.

    `ZClip` was made for the pretraining of large language models. If the norm may jump to a new
    level for good, use `AutoClip` instead. `ZClip` averages the norms after clipping. In modes
    "adaptive" and "mean", every norm at a new level therefore counts as a spike.

    z = (n - μ) / (σ + 1e-6);   if z > t: u ← u · (μ + σ t² / z) / n

    Here n is the norm of the step, and σ = √v. After the step, the averages change to
    μ ← α μ + (1 - α) c, and then to v ← α v + (1 - α)(c - μ)². Here c is the norm after clipping.

    Args:
        alpha: The decay rate of the averages. Default: 0.97.
        z_thresh: t, the z-score above which a norm is a spike. Default: 2.5.
        max_norm: A second, fixed limit that acts from the first step on, or None. The averages use
            the norm without this second limit. Default: 1.0.
        warmup_steps: The number of norms that the rule collects before it clips. The averages start
            from these norms. Default: 25.
        mode: The norm of a clipped spike: "adaptive" for μ + σ t² / z, "mean" for μ, and
            "percentile" for μ + σ t. Default: "adaptive".
        skip_on_spike: If True, the update of a spike becomes zero. Default: False.
        dim: The tensors that share one norm: "global", "group", "layer", or None for a separate
            norm per tensor. Default: "global".

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, ZClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ZClip(), Adam(), LR(1e-3))

    Reference:
        Kumar et al., "ZClip: adaptive spike mitigation for LLM pre-training", arXiv 2504.02507.
    """

    alpha: Live[Share] = 0.97
    z_thresh: Live[AboveZero] = 2.5
    max_norm: Live[Threshold | None] = 1.0
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
    """The averages of ZClip. They start from a population variance, and v uses the new μ."""

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
