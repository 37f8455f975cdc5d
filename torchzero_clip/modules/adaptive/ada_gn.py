"""AdaGN: a rule that replaces the norm of the update by the result of Adam for norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Share
from torchzero_clip.modules.adaptive.criterion import blend, blend_squares


class AdaGN(NormRule):
    """Adaptive gradient normalization: the new norm is the average norm divided by the RMS norm.

    Use `AdaGN` after `AdaClip` and before `Adam`. The three rules together are the method
    Stable-SPAM.

    m ← β₁ m + (1 - β₁) ‖u‖,   v ← β₂ v + (1 - β₂) ‖u‖²;   u ← u / ‖u‖ · m̂ / (√v̂ + eps)

    Here m̂ and v̂ are m and v with bias correction. If norms stay constant, the new norm is 1.
    After a spike the new norm is below 1, because a spike raises √v̂ more than m̂. If an update
    contains NaN or infinity, the averages m and v of this tensor do not change.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.7, 0.9).
        eps: A small number that is added to the denominator. Default: 1e-8.
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Slices are not supported. Default: None.

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
        # rms is √v, because v itself could overflow or underflow
        return {"mean": 0.0, "rms": 0.0, "step": 0.0}

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
