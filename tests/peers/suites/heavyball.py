"""HeavyBall's references in float64, and how near bfloat16 comes to them.

`test/test_reference.py` holds an optimizer to formulas written down anew: to 1e-12 in float64, and
in bfloat16 nearer to the truth, on average, than the same formulas kept in bfloat16.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Cautious,
    Chain,
    Modular,
    Sign,
    WeightDecay,
    named,
)

SOURCE = "HomebrewML/HeavyBall"
COMMIT = "6684c62bc800cc3ac39065ba9d1617e50db8f65c"
FILES = {"test/test_reference.py": "", "test/reference.py": ""}  # transcribed, not compared
RUNS = ["test/test_reference.py"]
PATHS: list[str] = []
SETTINGS: dict[str, str] = {}

OURS = {
    # The references divide by √max(v, eps): where v is larger that is an eps of 0 here.
    "adamw": lambda lr, beta1, beta2, weight_decay: Chain(
        Adam((beta1, beta2), 0.0), WeightDecay(weight_decay), LR(lr)
    ),
    "rmsprop": lambda lr, beta2, weight_decay: Chain(
        Adam((0.0, beta2), 0.0), WeightDecay(weight_decay), LR(lr)
    ),
    "laprop": lambda lr, beta1, beta2, weight_decay: Chain(
        Adam((0.0, beta2), 0.0), EMA(beta1, debias=True), WeightDecay(weight_decay), LR(lr)
    ),
    "sgd": lambda lr, weight_decay: Chain(WeightDecay(weight_decay), LR(lr)),
    "lion": lambda lr, beta1, beta2, weight_decay: named(
        "lion", lr=lr, betas=(beta1, beta2), weight_decay=weight_decay
    ),
    "signsgd": lambda lr, weight_decay: Chain(Sign(), WeightDecay(weight_decay), LR(lr)),
    "cautious_adamw": lambda lr, beta1, beta2, weight_decay: Chain(
        Adam((beta1, beta2), 0.0), Cautious(), WeightDecay(weight_decay), LR(lr)
    ),
    "ademamix": lambda lr, beta1, beta2, beta3, alpha, weight_decay: named(
        "ademamix",
        lr=lr,
        betas=(beta1, beta2, beta3),
        alpha=alpha,
        eps=0.0,
        weight_decay=weight_decay,
    ),
    "mars_adamw": lambda lr, beta1, beta2, mars_gamma, weight_decay: named(
        "mars_adamw",
        lr=lr,
        betas=(beta1, beta2),
        gamma=mars_gamma,
        eps=0.0,
        weight_decay=weight_decay,
    ),
}
THEIRS = "adopt unscaled_adamw nadam orthograd_adamw ortho_laprop laprop_ortho sign_laprop"

LEFT_OUT = {rf"\[({THEIRS.replace(' ', '|')})\]": "no chain is this method"}
DIFFERS: dict[str, str] = {}


def build(params: Any, recipe: Any, **arguments: Any) -> Modular:
    """What HeavyBall's `build` gives: an optimizer that has allocated the gradients."""
    for param in params:
        param.grad = torch.zeros_like(param)
    arguments.pop("eps", None)
    optimizer = Modular(params, recipe(**arguments), rounding="stochastic")
    optimizer.init_state()
    if "rounding/seed" in optimizer.param_groups[0]["chain"]:
        optimizer.param_groups[0]["chain"]["rounding/seed"] = torch.initial_seed()
    return optimizer


def put_ours() -> None:
    package, core = types.ModuleType("heavyball"), types.ModuleType("heavyball.core")
    vars(package).update(dict.fromkeys(THEIRS.split()), **OURS, core=core)
    vars(core).update(build=build, torch=torch)
    sys.modules.update({"heavyball": package, "heavyball.core": core})
