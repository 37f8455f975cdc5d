"""AdaGC: a rule that limits the norm of each tensor to a multiple of its average past norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Reach, Scope, UnitState
from torchzero_clip.core.bounds import Share, Threshold, Whole
from torchzero_clip.modules.adaptive.criterion import blend


class AdaGC(NormRule):
    """Adaptive gradient clipping: the limit of each tensor follows the past norms of the tensor.

    `AdaGC` was made for the pretraining of large language models. Use it before an optimizer such
    as `Adam`.

    u ← u · min(1, rel · γ / ‖u‖);   γ ← β γ + (1 - β) ‖u‖, the norm after clipping

    During the first `warmup_steps - 1` steps, the rule clips the global norm to `abs` instead. In
    these steps, γ is the smallest norm so far, measured after clipping. A gradient of zero does not
    change γ.

    Suppose the norm rises by a factor J and stays at the new level. Then γ grows by at most the
    factor β + (1 - β) · rel per step. At this rate, γ reaches the new level after
    log J / log(β + (1 - β) rel) steps.

    Args:
        rel: The largest ratio of a norm to γ. Default: 1.05.
        abs: The limit of the global norm during warm-up. Default: 1.0.
        beta: The decay rate of the average γ. Default: 0.98.
        warmup_steps: The step that ends the warm-up. Each tensor counts its own steps.
            Default: 100.
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaGC, Adam, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AdaGC(), Adam(), WeightDecay(0.1), LR(1e-3))

    Reference:
        Wang et al., "AdaGC: improving training stability for large language model pretraining",
        arXiv 2502.11034.
    """

    rel: Live[Threshold] = 1.05
    abs: Live[Threshold] = 1.0
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
        gamma = state["gamma"]
        warming = state["step"] + 1 < self.warmup_steps
        warmup_limit = norm / (self.total(group) / group["abs"]).clamp(min=1)
        # rel may be 0, and 0 · inf would be NaN
        usual_limit = torch.where(gamma == math.inf, gamma, group["rel"] * gamma)
        return torch.where(warming, warmup_limit, usual_limit)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        gamma = state["gamma"]
        step = state["step"] + 1
        lowest = torch.minimum(gamma, clipped.to(gamma.dtype))
        after = torch.where(gamma == math.inf, clipped, blend(gamma, clipped, group["beta"]))
        after = torch.where(step < self.warmup_steps, lowest, after)
        return {"gamma": torch.where(clipped > 0, after, gamma), "step": step}
