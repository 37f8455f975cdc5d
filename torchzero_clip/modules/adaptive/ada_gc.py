"""AdaGC: every tensor within a factor of its own past."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Reach, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Share, Whole
from torchzero_clip.modules.adaptive.criterion import blend


class AdaGC(NormRule):
    """u ← u · min(1, rel · γ / ‖u‖);   γ ← β γ + (1 - β) ‖u‖, the norm after clipping

    For the first steps, t < warmup_steps, the norm of all tensors is clipped to `abs` and
    γ ← min(γ, ‖u‖). A zero gradient leaves γ alone. After a lasting jump by a factor J, γ grows by
    at most β + (1 - β) · rel a step: it needs log J / log(β + (1 - β) rel) steps.

    Args:
        rel: How far above γ a norm may be.
        abs: The limit of the norm of all tensors during warm-up.
        beta: How much of γ is kept a step.
        warmup_steps: When the first phase ends, counted for each unit.
        dim: What is measured together: None each tensor, or "layer", "group", "global".

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaGC, Adam, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaGC(), Adam(), WeightDecay(0.1), LR(1e-3))

    Reference:
        Wang et al., "AdaGC: improving training stability for large language model pretraining",
        arXiv 2502.11034.
    """

    rel: Live[NonNegative] = 1.05
    abs: Live[NonNegative] = 1.0
    beta: Live[Share] = 0.98
    warmup_steps: Whole = 100
    dim: Scope = None

    pure = True

    @property
    def reach(self) -> Reach:
        return "model" if self.warmup_steps > 1 else super().reach

    def init_unit(self) -> dict[str, Any]:
        return {"gamma": math.inf, "step": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        together = norm / (self.total(group) / group["abs"]).clamp(min=1)
        gamma, warming = state["gamma"], state["step"] + 1 < self.warmup_steps
        later = torch.where(gamma == math.inf, gamma, group["rel"] * gamma)  # 0 · inf is NaN
        return torch.where(warming, together, later)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        gamma, step = state["gamma"], state["step"] + 1
        lowest = torch.minimum(gamma, clipped.to(gamma.dtype))
        after = torch.where(gamma == math.inf, clipped, blend(gamma, clipped, group["beta"]))
        after = torch.where(step < self.warmup_steps, lowest, after)
        return {"gamma": torch.where(clipped > 0, after, gamma), "step": step}
