"""SkipLarge: a guard that skips steps whose gradient norm is too large."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Count, Threshold
from torchzero_clip.modules.flow.step_guard import LARGE, NONFINITE, _Seen, _StepGuard


class SkipLarge(_StepGuard):
    """A guard against huge gradients: skips the step if their global norm exceeds `max_norm`.

    Use it as the first link, or next to another guard, if a step with a huge gradient should not
    happen at all. `ClipNorm` scales such a gradient down instead. The guard also skips the step if
    the norm is NaN or infinite. The guard does not synchronize with the GPU.

    Args:
        max_norm: The largest allowed global norm. Steps with a larger norm are skipped.
        max_consecutive: Raise `RuntimeError` after `max_consecutive` skipped steps in a row. The
            guard reads the count only every `max_consecutive` steps, so the error may come up to
            `max_consecutive - 1` steps late. None never raises. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SkipLarge
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SkipLarge(100.0), Adam(), LR(1e-3))
    """

    max_norm: Live[Threshold]
    max_consecutive: Count | None = None

    clips = True
    reason = "gradient norms above max_norm"
    pure = True

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        norm = seen.norm
        why = torch.where(torch.isfinite(norm), LARGE, NONFINITE)
        return torch.where(norm <= group["max_norm"], 0, why)
