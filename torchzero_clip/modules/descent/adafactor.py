"""Adafactor: an adaptive rule with little state and with steps relative to the weights."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, counter
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Within
from torchzero_clip.modules.descent.factored import Factored

SECOND = Factored("row_var", "col_var", "variance")


class Adafactor(NormRule):
    """Adafactor: an adaptive rule with little state, and with steps relative to the weights.

    Use it to save memory. For a matrix, the state has one number per row and one per column.

    u ← α · u / √V / max(1, RMS(u / √V) / d);   α = max(ε₂, RMS(w)) · min(1, 1 / (lr · √t))

    The second moment is V ← V + t^τ (u² - V), with τ = beta2_decay. For a tensor with two or more
    dims, the state stores only the averages of the rows and of the columns of V. If `LR` follows
    this rule, the RMS of a step is at most min(lr, 1 / √t) · d times the RMS of the weights. With
    `WeightDecay` between this rule and `LR` the chain is Adafactor (tested against torch).

    Args:
        beta2_decay: τ. A new square enters V with the weight t^τ, where t is the step number.
            Default: -0.8.
        eps: (ε₁, ε₂). ε₁ is the smallest √V. If ε₁ is None, it is the machine epsilon of the
            parameter's dtype. ε₂ is the smallest RMS of the weights. Default: (None, 1e-3).
        d: The largest RMS of the update before it is scaled by α. Default: 1.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adafactor, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adafactor(), LR(1e-2))

    Reference:
        Shazeer, Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235.
    """

    beta2_decay: Live[Annotated[float, Within(above=-math.inf, at_most=0)]] = -0.8
    eps: Live[tuple[NonNegative | None, NonNegative]] = (None, 1e-3)
    d: Live[AtLeastOne] = 1.0

    ord = "rms"
    reads = ("lr",)
    complex = "refuse"
    leaves = "ones"
    clips = False
    has_metrics = False
    pure = True

    def check(self) -> None:
        super().check()
        if self.eps[1] is None:
            raise ValueError(
                f"Adafactor: the second value of eps must be a number, got {self.eps!r}"
            )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param), **SECOND.init(param)}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        groups = [bucket.group for bucket in units.buckets]
        us = [bucket.u for bucket in units.buckets]
        counts = [bucket.state["step"].add_(1).stack() for bucket in units.buckets]
        powers = [t ** group["beta2_decay"] for t, group in zip(counts, groups, strict=True)]
        SECOND.follow(units.buckets, us, powers, [0.0] * len(us))
        smallest = [_smallest(*pair) for pair in zip(units.buckets, groups, strict=True)]
        updates = [SECOND.divide(*args) for args in zip(units.buckets, us, smallest, strict=True)]
        rms = units.norms_of(updates)
        weight_rms = units.norms_of([bucket.params for bucket in units.buckets])
        root_of_t = torch.cat([t.to(units.home) for t in counts]).sqrt()
        divisors = []
        for lr, d, (_, eps) in zip(*map(units.each, ("lr", "d", "eps")), strict=True):
            alpha = weight_rms.clamp(min=eps) * (1 / (lr * root_of_t)).clamp(max=1)
            divisors.append((rms / d).clamp(min=1) / alpha)
        units.scale(divisors, updates)
        return buckets


def _smallest(bucket: Bucket, group: Group) -> float | Tensor:
    """Return ε₁, the smallest √V. By default, this is the machine epsilon of the dtype."""
    eps: float | Tensor | None = group["eps"][0]
    return torch.finfo(bucket.dtype).eps if eps is None else eps
