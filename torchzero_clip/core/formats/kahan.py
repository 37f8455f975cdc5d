"""Kahan: what rounding has lost is remembered, and part of the next update."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest


class Kahan(Nearest):
    """Numbers at the nearest, with the compensation beside them: w + compensation is the weight."""

    key, dtype, whole = "rounding/compensation", torch.bfloat16, True  # float16 has not the range
    begins, ends = "the compensation starts at zero", "its compensation is dropped"

    def move(self, i: int, target: Tensor, at: int | None, u: Tensor, a: float, b: float) -> None:
        """Such an update comes whole: a is 1 and b is 0."""
        lost = self._beside(i, target, at)
        before, change = target.float(), lost - u.float()
        target.add_(change)
        change.add_(before.sub_(target))  # the step that was meant, less the step that was made
        lost.copy_(change.nan_to_num_(0.0, 0.0, 0.0))  # a NaN must not stay in the state
