"""Kahan summation: the part of an update that rounding removes is added to the next update."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core.formats.nearest import Nearest


class Kahan(Nearest):
    """A format that stores a compensation next to each parameter.

    The weight is the sum of the parameter and the compensation.
    """

    key = "rounding/compensation"
    dtype = torch.bfloat16  # the range of float16 is too small
    whole = True
    begins = "the compensation starts at zero"
    ends = "the saved compensation is dropped"

    def move(self, i: int, target: Tensor, at: int | None, u: Tensor, a: float, b: float) -> None:
        """Compute w ← w - u. `whole` is True, so a is 1 and b is 0."""
        compensation = self._beside(i, target, at)
        before = target.float()
        change = compensation - u.float()
        target.add_(change)
        change.add_(before.sub_(target))  # the intended change minus the actual change
        compensation.copy_(change.nan_to_num_(0.0, 0.0, 0.0))  # a NaN must not stay in the state
