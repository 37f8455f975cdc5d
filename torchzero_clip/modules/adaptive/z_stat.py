"""ZStat: a criterion that limits norms far above the average, measured in standard deviations."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import AboveZero, Share
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
    """The z-score of the norm: a norm more than `z_thresh` standard deviations above μ is a spike.

    z = (n - μ) / (√v + 1e-8);   if z > t the limit is μ + f · √v, f = clipping(z, t);
    v ← α v + (1 - α)(x - μ)²;   μ ← α μ + (1 - α) x

    Here n is the norm of the step and x is the observed norm, by default the norm after clipping.
    As long as v is zero, up to the rounding of μ, there is no limit.

    Suppose the norm rises to a new level for good. If the criterion observes clipped norms, "max"
    follows the norm, but "reciprocal" and "mean" do not: every later norm counts as a spike. With
    `observe="raw"` in `AdaptiveClip`, all three follow the norm. They then forget a spike of J
    standard deviations after log((1 - α) J²) / -log α steps.

    Args:
        alpha: The decay rate of the averages. Default: 0.97.
        z_thresh: t, the z-score above which a norm is a spike. Default: 2.5.
        clipping: The function f: "reciprocal" for t² / z, "mean" for 0, "max" for t, or a custom
            function of (z, t). Default: "reciprocal".

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, Modular, ZStat
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AdaptiveClip(ZStat(z_thresh=3.0))
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    alpha: Live[Share] = 0.97
    z_thresh: Live[AboveZero] = 2.5
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
        mean = state["mean"]
        std = state["std"]
        t = group["z_thresh"]
        z = (norm - mean) / (std + self.eps)
        limit = mean + clipping_function(self.clipping)(z, t) * std
        no_spike = at_most(norm, mean + t * (std + self.eps))
        return none_yet(torch.where(no_spike, torch.full_like(limit, torch.inf), limit), std)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        mean = state["mean"]
        std = state["std"]
        alpha = group["alpha"]
        return {
            "std": blend_squares(std, deviation(norm, mean), alpha),
            "mean": blend(mean, norm, alpha),
        }
