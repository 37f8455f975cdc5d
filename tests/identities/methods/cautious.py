"""Steps that agree with the gradient."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import need
from tests.identities.identity import optimizer


@optimizer(
    "cadamw",
    "`Adam`, `Cautious`, `WeightDecay`, `LR` is C-AdamW",
    source="timm 1.0.31, `AdamWLegacy(caution=True)`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    ),
)
def cadamw(groups: Any) -> Any:
    return need("timm.optim").AdamWLegacy(groups, caution=True)
