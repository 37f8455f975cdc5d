"""Methods that step by signs."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import need
from tests.identities.identity import optimizer


@optimizer(
    "lion",
    "`Lion`, then `WeightDecay`, then `LR`, is Lion",
    source="lion-pytorch 0.2.5, `lion_pytorch.Lion`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.7, 0.95), "weight_decay": 0.0},
    ),
)
def lion(groups: Any) -> Any:
    return need("lion_pytorch").Lion(groups)


@optimizer(
    "signum",
    "`EMA`, `Sign`, `WeightDecay`, `LR` is Signum",
    source="pytorch_optimizer 4.1.0, `SignSGD`",
    groups=(
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.02, "momentum": 0.7, "weight_decay": 0.0},
    ),
    keys={"beta": "momentum"},
)
def signum(groups: Any) -> Any:
    return need("pytorch_optimizer").SignSGD(groups)
