"""SkipLarge: no step where the gradients are too large."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Count, NonNegative
from torchzero_clip.modules.flow.step_guard import LARGE, NONFINITE, _Seen, _StepGuard


class SkipLarge(_StepGuard):
    """Skip the step where the norm of all gradients is above max_norm, or is no number

    It stands first, or next to another guard, and the host waits for nothing.

    Args:
        max_norm: The largest norm of a step that happens.
        max_consecutive: Raise after so many skipped steps in a row, or None. The host looks once in
            as many steps, and so may be late by as many.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SkipLarge
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SkipLarge(100.0), Adam(), LR(1e-3))
    """

    max_norm: Live[NonNegative]
    max_consecutive: Count | None = None

    clips = True
    reason = "norms above the limit"
    pure = True

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        norm = seen.norm
        why = torch.where(torch.isfinite(norm), LARGE, NONFINITE)
        return torch.where(norm <= group["max_norm"], 0, why)
