"""AdamW with other averages of the gradient."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import official_file
from tests.identities.identity import optimizer
from torchzero_clip import EMA, LR, Chain, ClipNorm, Mars, Sign, WeightDecay

ALWAYS_ONE = "the reference always uses 1"


def official_mars() -> Any:
    """The official optimizer, which takes two options of the groups once, when it is made."""
    official: Any = official_file("AGI-Arena/MARS", "MARS/optimizers/mars.py").MARS

    class OfGroups(official):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            self.gamma = self.param_groups[0]["gamma"]
            self.eps = self.param_groups[0]["eps"]
            return super().step(closure)

    return OfGroups


@optimizer(
    "mars_adamw",
    "`Mars`, `ClipNorm(1.0)`, `Adam`, `WeightDecay`, `LR` is MARS-AdamW",
    source="AGI-Arena/MARS 4831e28, `MARS/optimizers/mars.py`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "gamma": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.0},
    ),
    constant={"beta": "it is None here, and equals the first beta", "max_norm": ALWAYS_ONE},
)
def mars_adamw(groups: Any) -> Any:
    return official_mars()(groups, optimize_1d=True)


@optimizer(
    "mars_lion",
    "`Mars`, `ClipNorm(1.0)`, `EMA`, `Sign`, `WeightDecay`, `LR` is MARS-Lion",
    source="AGI-Arena/MARS 4831e28, `MARS/optimizers/mars.py`",
    ours=lambda lr, betas, weight_decay, gamma: Chain(
        Mars(betas[0], gamma), ClipNorm(1.0), EMA(betas[0]), Sign(), WeightDecay(weight_decay),
        LR(lr),
    ),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "gamma": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.0},
    ),
    keys={
        "Mars/beta": ("betas", 0),
        "EMA/beta": ("betas", 0),
    },
    constant={"max_norm": ALWAYS_ONE},
)  # fmt: skip
def mars_lion(groups: Any) -> Any:
    return official_mars()(groups, optimize_1d=True, mars_type="mars-lion")


@optimizer(
    "ademamix",
    "`AdEMAMix`, `WeightDecay`, `LR` is AdEMAMix",
    source="apple/ml-ademamix c3d73c0, `pytorch/ademamix.py`",
    groups=(
        {
            "lr": 0.05, "betas": (0.9, 0.99, 0.999), "alpha": 5.0, "eps": 1e-6,
            "weight_decay": 0.1, "alpha_warmup": 12, "beta3_warmup": 8,
        },
        {
            "lr": 0.02, "betas": (0.8, 0.95, 0.99), "alpha": 2.0, "eps": 1e-3,
            "weight_decay": 0.0, "alpha_warmup": None, "beta3_warmup": 14,
        },
    ),
)  # fmt: skip
def ademamix(groups: Any) -> Any:
    return official_file("apple/ml-ademamix", "pytorch/ademamix.py").AdEMAMix(groups)
