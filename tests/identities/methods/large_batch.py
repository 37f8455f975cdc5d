"""Methods whose step is in proportion to the weight of each layer."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import need
from tests.identities.identity import optimizer, transformation
from torchzero_clip import Chain, ClipNorm, named


@transformation(
    "lars",
    "`WeightDecay`, `TrustRatio`, `LR`, `Momentum` is LARS",
    source="optax 0.2.8, `optax.lars`",
    groups=(
        {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.02, "momentum": 0.9},
        {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.02, "momentum": 0.8},
    ),
)
def lars(lr: Any, **options: Any) -> Any:
    return need("optax").lars(lr, **options)


@transformation(
    "lamb",
    "`Adam`, `WeightDecay`, `TrustRatio`, `LR` is LAMB",
    source="optax 0.2.8, `optax.lamb`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    ),
)
def lamb(lr: Any, betas: Any, **options: Any) -> Any:
    return need("optax").lamb(lr, *betas, **options)


@optimizer(
    "lamb_timm",
    '`ClipNorm(dim="global")` in front of LAMB is the LAMB of timm',
    source="timm 1.0.31, `Lamb`",
    ours=lambda **options: Chain(ClipNorm(6.0, dim="global"), named("lamb", **options)),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
    ),
)
def lamb_timm(groups: Any) -> Any:
    return need("timm.optim").Lamb(groups, max_grad_norm=6.0)


@optimizer(
    "lambc",
    "LAMB with `TrustRatio(bounds=(0, 1))` is LAMBC",
    source="timm 1.0.31, `Lamb`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
    ),
)
def lambc(groups: Any) -> Any:
    return need("timm.optim").Lamb(groups, max_grad_norm=None, trust_clip=True)
