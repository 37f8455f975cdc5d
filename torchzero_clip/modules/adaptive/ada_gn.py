"""AdaGN: the norm that an Adam of norms would give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.adaptive.criterion import blend, blend_squares


class AdaGN(NormRule):
    """u ← u / ‖u‖ · m̂ / (√v̂ + eps);   m ← β₁ m + (1 - β₁) ‖u‖,   v ← β₂ v + (1 - β₂) ‖u‖²

    m̂ and v̂ are m and v without their start at zero. Norms that do not change become 1, and a
    spike, which raises √v̂ more than m̂, less than that. A unit with a NaN or an infinity leaves its
    averages as they were.

    Args:
        betas: How much of the two averages is kept a step.
        eps: Added to the denominator.
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, AdaClip, AdaGN, Adam, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> stable_spam = AdaClip(), AdaGN(), Adam()
        >>> opt = Modular(model.parameters(), *stable_spam, LR(1e-3))

    Reference:
        Huang et al., "Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam",
        arXiv 2502.17055.
    """

    betas: Live[tuple[Share, Share]] = (0.7, 0.9)
    eps: Live[NonNegative] = 1e-8
    dim: Scope = None

    sets_norm = True
    leaves = "own"
    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"mean": 0.0, "rms": 0.0, "step": 0.0}  # rms is √v, whose range is that of norms

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        finite = torch.isfinite(norm)
        after = self.observe(norm, norm, state, group)
        mean, rms, step = [torch.where(finite, after[key], state[key]) for key in after]
        beta1, beta2 = group["betas"]
        size = mean / (1 - beta1**step) / (rms / (1 - beta2**step).sqrt() + group["eps"])
        return torch.where(step > 0, size, 1.0)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        beta1, beta2 = group["betas"]
        return {
            "mean": blend(state["mean"], norm, beta1),
            "rms": blend_squares(state["rms"], norm, beta2),
            "step": state["step"] + 1,
        }
