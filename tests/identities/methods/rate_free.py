"""Methods that find their learning rate, against the code of their authors.

Theirs has one lr for all groups, which is checked, and the betas of the first.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.identities.follow import official_file
from tests.identities.identity import optimizer
from tests.identities.inputs import Inputs
from torchzero_clip import named

RESTS = (4, 15)
UNBOUNDED = "the growth of d has no bound here"


@dataclass(frozen=True)
class Slope(Inputs):
    """Gradients that agree, so that there is a way to go, and steps in which lr is 0."""

    def gradients(self, step: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        grads = super().gradients(step, dtype)
        return {name: None if grad is None else grad.abs() for name, grad in grads.items()}

    def varied(self, name: str, step: int, value: Any) -> Any:
        return 0.0 if name == "lr" and step in RESTS else super().varied(name, step, value)


PRODIGY = (
    {
        "lr": 1.0, "betas": (0.9, 0.99), "beta3": 0.8, "eps": 1e-6, "weight_decay": 0.1,
        "d_coef": 5.0, "growth_rate": 1.5,
    },
    {"eps": 1e-2, "weight_decay": 0.3, "d_coef": 1.0, "growth_rate": 1.6},
)  # fmt: skip
DADAPT = (
    {
        "lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1, "growth_rate": 2.0,
        "layer_scale": 1.0,
    },
    {"eps": 1e-2, "weight_decay": 0.3, "growth_rate": 1.6, "layer_scale": 0.3},
)  # fmt: skip


def quietly(make: Any, groups: Any, **options: Any) -> Any:
    """An optimizer that prints what its decay is."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make(groups, **options)


@optimizer(
    "prodigy",
    "`Prodigy`, then `LR`, is Prodigy",
    source="konstmish/prodigy 3efb213, version 1.1.2, `prodigyopt/prodigy.py`",
    ours=lambda **options: named("prodigy", d0=0.01, **options),
    groups=PRODIGY,
    inputs=Slope(),
)
def prodigy(groups: Any) -> Any:
    made = official_file("konstmish/prodigy", "prodigyopt/prodigy.py").Prodigy
    return quietly(made, groups, d0=0.01)


@optimizer(
    "prodigy_plain",
    "`Prodigy(betas=(0.0, 0.999))`, then `LR`, is Prodigy without an average of gradients",
    source="konstmish/prodigy 3efb213, version 1.1.2, `prodigyopt/prodigy.py`",
    ours=lambda **options: named("prodigy", d0=0.01, **options),
    groups=({**PRODIGY[0], "betas": (0.0, 0.99)}, PRODIGY[1]),
    inputs=Slope(),
)
def prodigy_plain(groups: Any) -> Any:
    return prodigy(groups)


FREELY: Any = tuple({**group, "d_coef": 2.0, "growth_rate": torch.inf} for group in PRODIGY)
FREELY[0]["beta3"] = None
SAFE: Any = {
    "d0": 0.01, "decouple": False, "use_bias_correction": True, "safeguard_warmup": True,
}  # fmt: skip


@optimizer(
    "prodigy_safeguarded",
    "`Prodigy(decouple=False, use_bias_correction=True, safeguard_warmup=True)`, then `LR`, is "
    "Prodigy with these options",
    source="konstmish/prodigy 3efb213, version 1.1.2, `prodigyopt/prodigy.py`",
    ours=lambda **options: named("prodigy", **SAFE, **options),
    groups=FREELY,
    constant={"growth_rate": UNBOUNDED},
    inputs=Slope(),
)
def prodigy_safeguarded(groups: Any) -> Any:
    made = official_file("konstmish/prodigy", "prodigyopt/prodigy.py").Prodigy
    return quietly(made, groups, **SAFE)


@optimizer(
    "prodigy_corrected",
    "`Prodigy(use_bias_correction=True)`, then `LR`, is Prodigy with that option",
    source="konstmish/prodigy 3efb213, version 1.1.2, `prodigyopt/prodigy.py`",
    ours=lambda **options: named("prodigy", d0=0.01, use_bias_correction=True, **options),
    groups=FREELY,
    constant={"growth_rate": UNBOUNDED},
    inputs=Slope(),
)
def prodigy_corrected(groups: Any) -> Any:
    made = official_file("konstmish/prodigy", "prodigyopt/prodigy.py").Prodigy
    return quietly(made, groups, d0=0.01, use_bias_correction=True)


@optimizer(
    "dadapt_adam",
    "`DAdaptAdam(decouple=False)` is Adam with D-Adaptation",
    source="facebookresearch/dadaptation c984980, `dadaptation/dadapt_adam.py`",
    ours=lambda **options: named("dadapt_adam", d0=0.01, **options),
    groups=DADAPT,
    inputs=Slope(),
)
def dadapt_adam(groups: Any) -> Any:
    made = official_file("facebookresearch/dadaptation", "dadaptation/dadapt_adam.py").DAdaptAdam
    return quietly(made, groups, d0=0.01)


@optimizer(
    "dadapt_adam_decoupled",
    "`DAdaptAdam(use_bias_correction=True)` is Adam with D-Adaptation, with `decouple=True`",
    source="facebookresearch/dadaptation c984980, `dadaptation/dadapt_adam.py`",
    ours=lambda **options: named(
        "dadapt_adam", d0=0.01, decouple=True, use_bias_correction=True, **options
    ),
    groups=tuple({**group, "growth_rate": torch.inf} for group in DADAPT),
    constant={"growth_rate": UNBOUNDED},
    inputs=Slope(),
)
def dadapt_adam_decoupled(groups: Any) -> Any:
    made = official_file("facebookresearch/dadaptation", "dadaptation/dadapt_adam.py").DAdaptAdam
    return quietly(made, groups, d0=0.01, decouple=True, use_bias_correction=True)
