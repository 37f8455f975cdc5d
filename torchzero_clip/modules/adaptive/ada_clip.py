"""AdaClip: a rule that limits each element to the usual largest element of the tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Decision, Group, Live, NormRule, State, TensorList, Units, UnitState
from torchzero_clip.core.bounds import Share
from torchzero_clip.modules.adaptive.criterion import blend


class AdaClip(NormRule):
    """Value clipping without a threshold: the limit is the usual largest element of the tensor.

    Use `AdaClip` before `AdaGN` and `Adam`. The three rules together are the method Stable-SPAM.

    uᵢ ← uᵢ · M̂ / ‖u‖∞ where |uᵢ| > M̂;   M ← θ M + (1 - θ) ‖u‖∞

    For each tensor, M is a running average of the largest magnitude. M̂ is M with bias correction.
    Gradients that are zero do not change M. Before the first nonzero gradient there is no limit. If
    a gradient contains NaN or infinity, the M of this tensor does not change.

    Args:
        theta: The decay rate of the average M. Default: 0.999.
        past_only: If True, the limit is computed from earlier steps only. If False, the limit
            includes the current step, as in the authors' code. A spike then raises its own limit.
            Default: True.

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
    per_entry = True
    widens = True
    complex = "whole"
    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"largest": 0.0, "step": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        if not self.past_only:
            finite = torch.isfinite(norm)
            after = self.observe(norm, norm, state, group)
            state = {key: torch.where(finite, after[key], state[key]) for key in after}
        bound = state["largest"] / (1 - group["theta"] ** state["step"])
        return torch.where(state["step"] > 0, bound, math.inf)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        largest = state["largest"]
        moved = blend(largest, norm, group["theta"])
        return {
            "largest": torch.where(norm > 0, moved, largest),
            "step": state["step"] + (norm > 0),
        }

    def apply(self, units: Units, decision: Decision) -> None:
        norm, bounds, ratios, _ = decision
        for members, bound, ratio in zip(units.groups, bounds, ratios, strict=True):
            # with -1 every magnitude is above the limit: a broken tensor is scaled as a whole
            floor = torch.where(torch.isfinite(norm), bound, -1.0)
            for bucket in members:
                scaled = units.divide(bucket, bucket.u.borrow(), ratio)
                bucket.apply(self, units, scaled=scaled, floor=floor)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return group["scaled"].where(u.abs().sub_(group["floor"]).positive(), u)
