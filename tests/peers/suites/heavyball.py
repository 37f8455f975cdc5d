"""HeavyBall's references in float64, and how near bfloat16 comes to them.

`test/test_reference.py` holds an optimizer to formulas written down anew: to 1e-12 in float64, and
in bfloat16 nearer to the truth, on average, than the same formulas kept in bfloat16.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import torchzero_clip as tz
from torchzero_clip import LR, Chain, Modular, OrthoGrad, Transform, WeightDecay, named

SOURCE = "HomebrewML/HeavyBall"
COMMIT = "6684c62bc800cc3ac39065ba9d1617e50db8f65c"
FILES = {"test/test_reference.py": "690e7e36b075", "test/reference.py": "556b6cace8f3"}
RUNS = ["test/test_reference.py"]
PATHS: list[str] = []
SETTINGS = {"OMP_NUM_THREADS": "1"}

# The references divide by √max(v, eps): where v is larger that is an eps of 0 here.
ADAM: Callable[..., Transform] = lambda b1, b2: tz.Adam((b1, b2), 0.0)  # noqa: E731
LAPROP: Callable[..., Transform] = lambda b1, b2: tz.LaProp((b1, b2), 0.0)  # noqa: E731
CHAINS: dict[str, Callable[[float, float], list[Transform]]] = {  # of the two betas
    "adamw": lambda *betas: [ADAM(*betas)],
    "rmsprop": lambda _, beta: [ADAM(0.0, beta)],
    "laprop": lambda *betas: [LAPROP(*betas)],
    "sgd": lambda *_: [],
    "signsgd": lambda *_: [tz.Sign()],
    "cautious_adamw": lambda *betas: [ADAM(*betas), tz.Cautious()],
    "orthograd_adamw": lambda *betas: [OrthoGrad(), ADAM(*betas)],
    "ortho_laprop": lambda *betas: [OrthoGrad(), LAPROP(*betas)],
    "laprop_ortho": lambda *betas: [LAPROP(*betas), OrthoGrad()],
    "sign_laprop": lambda *betas: [LAPROP(*betas), tz.Graft(tz.Scale(1.0), tz.Sign())],
}
NAMED: dict[str, dict[str, Any]] = {
    "lion": {},
    "adopt": {"eps": 1e-8, "clip_power": None, "decouple": True},
    "ademamix": {"eps": 0.0},
    "nadam": {"eps": 0.0, "decoupled_weight_decay": True},
    "mars_adamw": {"eps": 0.0},
}
LEFT_OUT = {r"\[unscaled_adamw\]": "this library does not have the method"}
DIFFERS: dict[str, str] = {}


def build(params: Any, name: str, lr: float, weight_decay: float, **arguments: Any) -> Modular:
    """What HeavyBall's `build` gives: an optimizer that has allocated the gradients."""
    betas = tuple(arguments.pop(f"beta{k}", 0.0) for k in (1, 2, 3)[: 2 + (name == "ademamix")])
    arguments.pop("eps", None)
    if name in NAMED:
        given = {key.removeprefix("mars_"): value for key, value in arguments.items()}
        given |= {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        chain = named(name, **given, **NAMED[name])
    else:
        chain = Chain(*CHAINS[name](*betas), WeightDecay(weight_decay), LR(lr))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = Modular(params, chain, rounding="stochastic")
    optimizer.init_state()
    if "rounding/seed" in optimizer.param_groups[0]["chain"]:
        optimizer.param_groups[0]["chain"]["rounding/seed"] = torch.initial_seed()
    return optimizer


def put_ours() -> None:
    package, core = types.ModuleType("heavyball"), types.ModuleType("heavyball.core")
    names = [*CHAINS, *NAMED, "unscaled_adamw"]
    vars(package).update({name: name for name in names}, core=core)
    vars(core).update(build=build, torch=torch)
    sys.modules.update({"heavyball": package, "heavyball.core": core})
