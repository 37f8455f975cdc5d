"""AdamW with other averages of the gradient."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import official_file
from tests.identities.identity import optimizer
from torchzero_clip import EMA, LR, Chain, ClipNorm, Mars, Sign, WeightDecay, named


@optimizer(
    "mars_adamw",
    "`Mars`, `ClipNorm(1.0)`, `Adam`, `WeightDecay`, `LR` is MARS-AdamW",
    source="AGI-Arena/MARS 4831e28, `MARS/optimizers/mars.py`",
    ours=lambda lr, betas, weight_decay: named(
        "mars_adamw", lr=lr, betas=betas, weight_decay=weight_decay, gamma=0.1
    ),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.0, "beta": 0.8},  # of Mars as well
    ),
)
def mars_adamw(groups: Any) -> Any:
    mars = official_file("AGI-Arena/MARS", "MARS/optimizers/mars.py").MARS
    return mars(groups, gamma=0.1, optimize_1d=True)


@optimizer(
    "mars_lion",
    "`Mars`, `ClipNorm(1.0)`, `EMA`, `Sign`, `WeightDecay`, `LR` is MARS-Lion",
    source="AGI-Arena/MARS 4831e28, `MARS/optimizers/mars.py`",
    ours=lambda lr, weight_decay: Chain(
        Mars(0.9, 0.1), ClipNorm(1.0), EMA(0.9), Sign(), WeightDecay(weight_decay), LR(lr)
    ),
    groups=({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}),
)
def mars_lion(groups: Any) -> Any:
    mars = official_file("AGI-Arena/MARS", "MARS/optimizers/mars.py").MARS
    return mars(groups, betas=(0.9, 0.99), gamma=0.1, optimize_1d=True, mars_type="mars-lion")


@optimizer(
    "ademamix",
    "`AdEMAMix`, `WeightDecay`, `LR` is AdEMAMix",
    source="apple/ml-ademamix, `pytorch/ademamix.py`",
    groups=(
        {
            "lr": 0.05, "betas": (0.9, 0.99, 0.999), "alpha": 5.0, "eps": 1e-6,
            "weight_decay": 0.1, "alpha_warmup": 12, "beta3_warmup": 8,
        },
        {
            "lr": 0.02, "betas": (0.8, 0.95, 0.99), "alpha": 2.0, "eps": 1e-3,
            "weight_decay": 0.0, "alpha_warmup": None, "beta3_warmup": 30,
        },
    ),
)  # fmt: skip
def ademamix(groups: Any) -> Any:
    return official_file("apple/ml-ademamix", "pytorch/ademamix.py").AdEMAMix(groups)
