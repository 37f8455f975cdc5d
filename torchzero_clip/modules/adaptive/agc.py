"""AGC: adaptive gradient clipping, the limit a share of the weight's norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class AGC(NormRule):
    """u ← u · limit / max(‖u‖, 1e-6) where ‖u‖ > limit = clipping · max(‖w‖, eps), unit by unit

    A unit is a row of a weight, all dims but the first; a bias, another vector and a single number
    are one unit each.

    Args:
        clipping: The largest ratio of the two norms.
        eps: The smallest ‖w‖ that counts, so that weights at zero can move.
        exclude_1d: Leave parameters of less than two dims alone. It counts where the scope is
            "unit" or None.
        dim: "unit", or another scope as in `ClipNorm`.

    Example:
        >>> import torch
        >>> from torchzero_clip import AGC, LR, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AGC(0.01), Momentum(0.9), LR(0.1))

    Reference:
        Brock et al., "High-performance large-scale image recognition without normalization",
        arXiv 2102.06171.
    """

    clipping: Live[NonNegative] = 0.01
    eps: Live[NonNegative] = 1e-3
    exclude_1d: bool = False
    dim: Any = "unit"

    pure = True

    @property
    def scope(self) -> Scope:
        return () if self._of_units() else self.dim

    def _of_units(self) -> bool:
        """Whether norms are as the paper has them: one a unit, or one a tensor."""
        return self.dim is None or (isinstance(self.dim, str) and self.dim == "unit")

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        if not self._of_units():
            return super().dims(tensor)
        every = tuple(range(max(tensor.dim(), 1)))  # as in torch, a number has a dim 0
        if tensor.dim() <= 1:
            return () if self.exclude_1d else every
        return every[1:] if self.dim == "unit" else every

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        limit = group["clipping"] * self.measure(group["params"]).clamp(min=group["eps"])
        return torch.where((norm > limit) & (norm < 1e-6), limit * (norm / 1e-6), limit)
