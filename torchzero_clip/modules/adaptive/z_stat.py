"""ZStat: a limit in standard deviations above the average."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Positive, Share
from torchzero_clip.modules.adaptive.criterion import (
    TIE,
    Clipping,
    Criterion,
    at_most,
    blend,
    blend_squares,
    check_clipping,
    clipping_function,
    deviation,
    none_yet,
)


class ZStat(Criterion):
    """z = (n - μ) / (√v + 1e-8);   if z > t the limit is μ + f · √v, f = clipping(z, t)

    Then v ← α v + (1 - α)(x - μ)², and μ ← α μ + (1 - α) x. While v is zero, up to the
    rounding of μ, there is no limit.
    With clipped norms, "reciprocal" and "mean" never follow a lasting rise to a new level: every
    later norm is a spike. "max" does, and so do all with `observe="raw"`, which then forget a
    spike of J deviations after log((1 - α) J²) / -log α steps.

    Args:
        alpha: How much of the averages is kept a step.
        z_thresh: t, from which z on a norm is a spike.
        clipping: "reciprocal" for f = t² / z, "mean" for 0, "max" for t, or a function of (z, t).

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, ZStat
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AdaptiveClip(ZStat(z_thresh=3.0))
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    alpha: Live[Share] = 0.97
    z_thresh: Live[Positive] = 2.5
    clipping: Clipping = "reciprocal"

    observes = "clipped"
    least_warmup = 2
    eps: ClassVar[float] = 1e-8

    pure = True

    def check(self) -> None:
        check_clipping(self)

    def init_unit(self) -> dict[str, Any]:
        return {"mean": 0.0, "std": 0.0}

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        std = var.sqrt()
        return {"mean": mean, "std": torch.where(std <= TIE * mean, torch.zeros_like(std), std)}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        mean, std, t = state["mean"], state["std"], group["z_thresh"]
        z = (norm - mean) / (std + self.eps)
        limit = mean + clipping_function(self.clipping)(z, t) * std
        usual = at_most(norm, mean + t * (std + self.eps))
        return none_yet(torch.where(usual, torch.full_like(limit, torch.inf), limit), std)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        mean, std, alpha = state["mean"], state["std"], group["alpha"]
        return {
            "std": blend_squares(std, deviation(norm, mean), alpha),
            "mean": blend(mean, norm, alpha),
        }
