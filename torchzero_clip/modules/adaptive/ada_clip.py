"""AdaClip: entries far above the usual largest one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Decision, Group, Live, NormRule, State, TensorList, Units, UnitState
from torchzero_clip.core.bounds import Share
from torchzero_clip.modules.adaptive.criterion import blend


class AdaClip(NormRule):
    """uᵢ ← uᵢ · M̂ / ‖u‖∞ where |uᵢ| > M̂;   M ← θ M + (1 - θ) ‖u‖∞

    M̂ is M without its start at zero: the average of the largest entry of each tensor. There is no
    bound until one other than zero has been seen, and zero gradients do not count. A tensor with a
    NaN or an infinity leaves its average as it was.

    Args:
        theta: How much of the average is kept a step.
        past_only: Bound entries by the steps before this one. False counts this one too, as the
            code of the authors does: a spike then raises its own bound.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaClip, AdaGN, Adam, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaClip(), AdaGN(), Adam(), LR(1e-3))

    Reference:
        Huang et al., "Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam",
        arXiv 2502.17055.
    """

    theta: Live[Share] = 0.999
    past_only: bool = True

    ord = math.inf
    per_entry = widens = True
    complex = "whole"
    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"largest": 0.0, "step": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        if not self.past_only:
            counts = torch.isfinite(norm)
            after = self.observe(norm, norm, state, group)
            state = {key: torch.where(counts, after[key], state[key]) for key in after}
        bound = state["largest"] / (1 - group["theta"] ** state["step"])
        return torch.where(state["step"] > 0, bound, math.inf)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        largest, step = state["largest"], state["step"]
        moved = blend(largest, norm, group["theta"])
        return {"largest": torch.where(norm > 0, moved, largest), "step": step + (norm > 0)}

    def apply(self, units: Units, decision: Decision) -> None:
        norm, bounds, ratios, _ = decision
        for members, bound, ratio in zip(units.groups, bounds, ratios, strict=True):
            floor = torch.where(torch.isfinite(norm), bound, -1.0)  # else all of the tensor is cut
            for bucket in members:
                cut = units.divide(bucket, bucket.u.borrow(), ratio)
                bucket.apply(self, units, cut=cut, floor=floor)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return group["cut"].where(u.abs().sub_(group["floor"]).positive(), u)
