"""Weights for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.modules.rows.row import Bad, Makers, Row
from torchzero_clip import (
    LR,
    Chain,
    Lookahead,
    ScheduleFree,
    Transform,
    WeightAverage,
    WeightEMA,
)

STEPS: list[Bad] = [
    ({"target": "grad"}, ValueError, "target must be 'update', got 'grad'"),
    (
        {"state_dtype": "bfloat16"},
        ValueError,
        "state_dtype must be 'float32' or None, got 'bfloat16', because averaged",
    ),
]


def behind(lr: float, **makes: Callable[..., Transform]) -> Makers:
    """Constructions behind a learning rate, where these links stand."""
    made: dict[str, Any] = {
        name.replace("_", " "): lambda make=make: Chain(LR(lr), make())
        for name, make in makes.items()
    }
    return made


ROWS = [
    Row(
        WeightEMA,
        good=behind(
            0.1,
            default=WeightEMA,
            short=lambda: WeightEMA(0.5),
            every_2=lambda: WeightEMA(0.5, every=2),
            warmup=lambda: WeightEMA(0.5, warmup=True),
        ),
        bad=[*STEPS],
        loose=behind(1.0, any=lambda: WeightEMA(0.5)),
        aims=False,
        last=True,
        attaches=False,
        per_entry=True,
    ),
    Row(
        WeightAverage,
        good=behind(
            0.1,
            default=WeightAverage,
            late=lambda: WeightAverage(2),
            every_2=lambda: WeightAverage(1, 2),
        ),
        bad=[*STEPS],
        loose=behind(1.0, any=WeightAverage),
        aims=False,
        last=True,
        attaches=False,
        per_entry=True,
    ),
    Row(
        Lookahead,
        good=behind(
            0.1,
            default=Lookahead,
            k_2=lambda: Lookahead(2),
            sync=lambda: Lookahead(2, 0.8, start="sync"),
        ),
        bad=[*STEPS],
        loose=behind(1.0, early=lambda: Lookahead(100)),
        memory="free",
        aims=False,
        last=True,
        attaches=False,
        adds=True,
        per_entry=True,
    ),
    Row(
        ScheduleFree,
        good=behind(
            0.1,
            default=ScheduleFree,
            weighted=lambda: ScheduleFree(0.5, r=1.0, weight_lr_power=1.0),
        ),
        bad=[*STEPS],
        memory="free",
        aims=False,
        last=True,
        attaches=False,
        adds=True,
        per_entry=True,
        graphs=2,  # torch's compiler starts over once, for numbers that are kept once
    ),
]
