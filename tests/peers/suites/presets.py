"""Adam with a rule in front, for the tests that torch has of Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchzero_clip import (
    AGC,
    AdaGC,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Normalize,
    SoftClip,
    SpikeClip,
    Transform,
    ZClip,
)

from .chains import Published, published

RULES: dict[str, Callable[[], Transform]] = {
    "ClipNorm": lambda: ClipNorm(1.0, dim="global"),
    "ClipValue": lambda: ClipValue(0.5),
    "Normalize": lambda: Normalize(1.0),
    "SoftClip": lambda: SoftClip(1.0),
    "ClipNormGrowth": ClipNormGrowth,
    "ZClip": lambda: ZClip(warmup_steps=3),
    "AutoClip": AutoClip,
    "AdaGC": AdaGC,
    "AGC": AGC,
    "SpikeClip": SpikeClip,
}


class Preset(Published):
    """AdamW with a rule in front, without decay unless it is asked for."""

    def __init__(self, params: Any, lr: Any = 1e-3, **arguments: Any) -> None:
        super().__init__(params, lr, **{"weight_decay": 0.0, **arguments})


def preset(name: str) -> type[Published]:
    return published("adamw", name, Preset, front=(RULES[name](),))
