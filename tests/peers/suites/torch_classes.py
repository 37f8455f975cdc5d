"""Chains under the names of torch's optimizers, for torch's own tests to train with."""

from __future__ import annotations

from typing import Any

import torchzero_clip as tz
from torchzero_clip import LR, WeightDecay, optimizer_class


class _Takes:
    """The arguments with which torch's classes choose a kernel choose nothing here."""

    def __init__(self, *args: Any, foreach: Any = None, fused: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class SGD(_Takes, optimizer_class(WeightDecay(0.0), tz.Momentum(0.0), LR(1e-3))):  # type: ignore[misc]
    """torch.optim.SGD"""


class Adam(_Takes, optimizer_class(WeightDecay(0.0), tz.Adam(), LR(1e-3))):  # type: ignore[misc]
    """torch.optim.Adam"""


class AdamW(_Takes, optimizer_class(tz.Adam(), WeightDecay(0.01), LR(1e-3))):  # type: ignore[misc]
    """torch.optim.AdamW"""
