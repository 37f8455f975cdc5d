"""Adafactor: second moments of rows and columns alone, and steps as large as the weights ask."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, counter
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Within
from torchzero_clip.modules.descent.factored import Factored

SECOND = Factored("row_var", "col_var", "variance")


class Adafactor(NormRule):
    """u ← α · u / √V / max(1, RMS(u / √V) / d);   α = max(ε₂, RMS(w)) · min(1, 1 / (lr · √t))

    V ← V + t^τ (u² - V), τ = beta2_decay, is kept for tensors of two and more dims as the averages
    of rows and of columns. With `LR` after it steps have at most the size min(lr, 1 / √t) · d times
    that of the weights. With `WeightDecay` between the two it is Adafactor (tested against torch).

    Args:
        beta2_decay: The power of the number of steps with which a gradient's part of V shrinks.
        eps: (ε₁, ε₂), the smallest √V, None for the spacing of the parameter's dtype at 1, and the
            smallest size of the weights.
        d: The largest RMS of the update.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adafactor, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adafactor(), LR(1e-2))

    Reference:
        Shazeer, Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235.
    """

    beta2_decay: Live[Annotated[float, Within(at_most=0)]] = -0.8
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
            raise ValueError(f"Adafactor: the second of eps must be a number, got {self.eps!r}")

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param), **SECOND.init(param)}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        groups = [bucket.group for bucket in units.buckets]
        us = [bucket.u for bucket in units.buckets]
        counts = [bucket.state["step"].add_(1).stack() for bucket in units.buckets]
        powers = [t ** group["beta2_decay"] for t, group in zip(counts, groups, strict=True)]
        SECOND.follow(units.buckets, us, powers, [0.0] * len(us))
        least = [_smallest(*row) for row in zip(units.buckets, groups, strict=True)]
        updates = [SECOND.divide(*row) for row in zip(units.buckets, us, least, strict=True)]
        rms = units.norms_of(updates)
        size = units.norms_of([bucket.params for bucket in units.buckets])
        time = torch.cat([t.to(units.home) for t in counts]).sqrt()
        divisors = []
        for lr, d, (_, eps) in zip(*map(units.each, ("lr", "d", "eps")), strict=True):
            alpha = size.clamp(min=eps) * (1 / (lr * time)).clamp(max=1)
            divisors.append((rms / d).clamp(min=1) / alpha)
        units.scale(divisors, updates)
        return buckets


def _smallest(bucket: Bucket, group: Group) -> float | Tensor:
    """The smallest √V: where none is given the spacing of the dtype at 1."""
    eps: float | Tensor | None = group["eps"][0]
    return torch.finfo(bucket.dtype).eps if eps is None else eps
