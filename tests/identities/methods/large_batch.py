"""Methods whose step is in proportion to the weight of each layer."""

from __future__ import annotations

from typing import Any

from tests.identities.follow import need
from tests.identities.identity import optimizer, transformation
from tests.identities.inputs import Inputs
from torchzero_clip import Chain, ClipNorm, named

NO_BOUNDS, NO_FACTOR = "the reference has no bounds", "the reference has no factor"
STEPS_OF_A_GROUP = Inputs(gaps=False)  # timm counts them, ours those of a parameter


@transformation(
    "lars",
    "`WeightDecay`, `TrustRatio`, `LR`, `Momentum` is LARS",
    source="optax 0.2.8, `optax.lars`",
    groups=(
        {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.02, "momentum": 0.9},
        {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.03, "momentum": 0.8},
    ),
    keys={"coefficient": "trust_coefficient"},
    constant={"bounds": NO_BOUNDS, "dampening": "optax has no such option"},
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
    constant={"bounds": NO_BOUNDS, "coefficient": NO_FACTOR},
)
def lamb(lr: Any, betas: Any, **options: Any) -> Any:
    return need("optax").lamb(lr, *betas, **options)


@optimizer(
    "lamb_timm",
    '`ClipNorm(dim="global")` in front of LAMB is the LAMB of timm, if the weight decay is not 0',
    source="timm 1.0.31, `Lamb`",
    ours=lambda max_grad_norm, **options: Chain(
        ClipNorm(max_grad_norm, dim="global"), named("lamb", **options)
    ),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 6.0},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
    ),
    keys={"max_norm": "max_grad_norm"},
    constant={"bounds": NO_BOUNDS, "coefficient": NO_FACTOR},
    inputs=STEPS_OF_A_GROUP,
)
def lamb_timm(groups: Any) -> Any:
    class Clipped(need("timm.optim").Lamb):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            self.defaults["max_grad_norm"] = self.param_groups[0]["max_grad_norm"]
            return super().step(closure)

    return Clipped(groups)


@optimizer(
    "lambc",
    "LAMB with `TrustRatio(bounds=(0, 1))` is LAMBC, if the weight decay is not 0",
    source="timm 1.0.31, `Lamb`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
    ),
    constant={"bounds": "timm always uses 0 and 1", "coefficient": NO_FACTOR},
    inputs=STEPS_OF_A_GROUP,
)
def lambc(groups: Any) -> Any:
    return need("timm.optim").Lamb(groups, max_grad_norm=None, trust_clip=True)
