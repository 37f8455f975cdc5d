"""AGC: a rule that limits the norm of the update to a fraction of the norm of the weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Threshold


class AGC(NormRule):
    """Adaptive gradient clipping: limits the norm of a gradient to a fraction of the weight norm.

    `AGC` makes training without batch normalization stable at large batch sizes. Use it before
    `Momentum`, or after `Adam`. The rule has no state.

    u ← u · limit / max(‖u‖, 1e-6) where ‖u‖ > limit = clipping · max(‖w‖, eps), unit by unit

    Here w is the weight. A unit is a row of a weight matrix or a filter of a convolution. It covers
    all dims except the first. A bias, another vector or a single number is one unit.

    Args:
        clipping: The largest ratio of the norm of the update to the norm of the weight.
            `math.inf` never clips. Default: 0.01.
        eps: The smallest ‖w‖ in the formula, so that a weight at zero can move. Default: 1e-3.
        exclude_1d: If True, parameters with fewer than two dims pass unchanged. This needs
            `dim="unit"` or `dim=None`. Default: False.
        dim: The elements that share one norm: "unit", or another scope as in `ClipNorm`.
            Default: "unit".

    Example:
        >>> import torch
        >>> from torchzero_clip import AGC, LR, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), AGC(0.01), Momentum(0.9), LR(0.1))

    Reference:
        Brock et al., "High-performance large-scale image recognition without normalization",
        arXiv 2102.06171.
    """

    clipping: Live[Threshold] = 0.01
    eps: Live[NonNegative] = 1e-3
    exclude_1d: bool = False
    dim: Any = "unit"

    pure = True

    @property
    def scope(self) -> Scope:
        return () if self._of_units() else self.dim

    def check(self) -> None:
        super().check()
        if isinstance(self.clipping, Tensor) or isinstance(self.eps, Tensor):
            return  # reading a tensor would synchronize with the device
        if self.clipping == math.inf and self.eps == 0:
            raise ValueError(
                "AGC: eps must be above 0 if clipping is infinite, because a zero weight would "
                f"have a limit of NaN, got {self.eps!r}"
            )

    def _of_units(self) -> bool:
        """Return whether `dim` is a scope of the paper: one norm per unit, or per tensor."""
        return self.dim is None or (isinstance(self.dim, str) and self.dim == "unit")

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        if not self._of_units():
            return super().dims(tensor)
        all_dims = tuple(range(max(tensor.dim(), 1)))  # as in torch, a number has a dim 0
        if tensor.dim() <= 1:
            return () if self.exclude_1d else all_dims
        return all_dims[1:] if self.dim == "unit" else all_dims

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        limit = group["clipping"] * self.measure(group["params"]).clamp(min=group["eps"])
        return torch.where((norm > limit) & (norm < 1e-6), limit * (norm / 1e-6), limit)
