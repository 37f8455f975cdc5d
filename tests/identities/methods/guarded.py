"""AdamW that is guarded against spikes."""

from __future__ import annotations

import warnings
from typing import Any

from tests.identities.follow import need, official_file
from tests.identities.identity import optimizer
from tests.identities.inputs import Inputs
from torchzero_clip import named


@optimizer(
    "stable_adamw",
    "`StableAdam`, `LR` is StableAdamW",
    source="torch-optimi 0.3.3, `StableAdamW`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
    ),
    constant={
        "betas": "the reference corrects the averages themselves, which is the same only while "
        "they are constant",
        "eps": "the reference keeps the square of the initial value",
    },
    inputs=Inputs(gaps=False),  # it counts the steps of a group, ours those of a parameter
)
def stable_adamw(groups: Any) -> Any:
    theirs = [{**group, "beta1": group["betas"][0], "beta2": group["betas"][1]} for group in groups]
    return need("optimi").StableAdamW(theirs, lr=0.0, foreach=False, triton=False)


@optimizer(
    "spam",
    '`Reset` of `SpikeClip` and `Adam`, with `keep=("step",)`, then `LR`, is SPAM',
    source="TianjinYellow/SPAM-Optimizer e8185fb, `galore_torch/SPAM.py`",
    groups=(
        {
            "lr": 0.05,
            "betas": (0.9, 0.95),
            "eps": 0.0,
            "threshold": 300.0,
            "weight_decay": 0.1,
            "every": 9,
            "warmup": 4,
            "wait": 4,
        },
        {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.01},
    ),
    constant={
        "beta": "it is None here, and equals the second beta",
        "eps": "the reference has no such value in this place, so it is 0",
    },
    # where an entry had no signal before the clip begins, theirs is held at zero until the next
    # reset and ours moves; it counts the steps of the model, ours those of a parameter
    inputs=Inputs(zero_start=False, gaps=False),
)
def spam(groups: Any) -> Any:
    module = official_file("TianjinYellow/SPAM-Optimizer", "galore_torch/SPAM.py")

    class Quiet(module.AdamW):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            self.thres = self.param_groups[0]["threshold"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its schedule asks torch in a way of old
                return super().step(closure)

    return Quiet(
        groups, eps=0.0, threshold=300.0, DeltaT=9, warmup_steps=4, grad_accu_steps=4,
        no_deprecation_warning=True,
    )  # fmt: skip


@optimizer(
    "stable_spam",
    "`AdaClip(past_only=False)`, `AdaGN`, `Reset(Adam())`, `WeightDecay`, `LR` is Stable-SPAM up "
    "to its first reset",
    source="TianjinYellow/StableSPAM 6a66da1, `galore_torch/stablespam.py`",
    ours=lambda gamma1, gamma2, gamma3, **options: named(
        "stable_spam", gammas=(gamma1, gamma2), theta=gamma3, **options
    ),
    groups=(
        {
            "lr": 0.05,
            "betas": (0.9, 0.99),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "gamma1": 0.7,
            "gamma2": 0.9,
            "gamma3": 0.999,
        },
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.01},
    ),
    keys={
        "AdaGN/betas": ("gamma1", "gamma2"),
        "AdaGN/eps": "eps",
        "Reset/Adam/betas": "betas",
        "Reset/Adam/eps": "eps",
        "theta": "gamma3",
    },
    constant={"every": "the reference takes one more step with the old averages at a reset"},
    # zeros lower the bound of theirs; its reset steps once more with the old averages, debiased as
    # if they were new, so no reset is among the steps
    inputs=Inputs(zero_start=False, zero_step=False),
)
def stable_spam(groups: Any) -> Any:
    module = official_file("TianjinYellow/StableSPAM", "galore_torch/stablespam.py")

    class OfGroups(module.StableSPAM):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            self.gamma1, self.gamma2, self.theta = (group[f"gamma{i}"] for i in (1, 2, 3))
            return super().step(closure)

    return OfGroups(groups)
