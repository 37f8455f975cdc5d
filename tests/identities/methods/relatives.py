"""Relatives of Adam, against the code of their authors."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import torch

from tests.identities.follow import need, official_file
from tests.identities.identity import optimizer, rewriter
from tests.identities.inputs import ORDINARY, Inputs
from torchzero_clip import Grokfast, OrthoGrad, named

ADAM: Any = (
    {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
)
FIXED = "in the reference it is a function, which only the constructor accepts"
TINY = "the reference has no bias correction, so both use a negligible value"


class Alone:
    """An optimizer for each parameter, of those that count the steps of a whole group."""

    def __init__(self, make: Callable[[Any], Any], groups: Any) -> None:
        self.made = [make([{**g, "params": [p]}]) for g in groups for p in g["params"]]
        self.param_groups = [group for made in self.made for group in made.param_groups]

    def step(self) -> None:
        for made in self.made:
            if made.param_groups[0]["params"][0].grad is not None:
                made.step()


@optimizer(
    "adam_atan2",
    "`AdamAtan2`, `WeightDecay`, `LR` is Adam-atan2",
    source="adam-atan2-pytorch 0.4.1, `adam_atan2_pytorch.AdamAtan2`",
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "a": 1.27, "b": 1.0},
        {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.01, "a": 1.0, "b": 0.8},
    ),
)
def adam_atan2(groups: Any) -> Any:
    return need("adam_atan2_pytorch.adam_atan2").AdamAtan2(groups)


def official_adabelief(groups: Any, **options: Any) -> Any:
    """Without what it prints, and with what it remembers of other steps forgotten.

    It keeps the rectification of ten steps for all rows of a group, those with older betas too.
    """
    official: Any = need("adabelief_pytorch").AdaBelief

    class Fresh(official):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["buffer"] = [[None, None, None] for _ in range(10)]
            return super().step(closure)

    with contextlib.redirect_stdout(io.StringIO()):
        return Fresh(groups, print_change_log=False, **options)


BELIEF: Any = (  # with these β₂ there is something to rectify in some of the steps
    {"lr": 0.05, "betas": (0.9, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.01},
)


@optimizer(
    "adabelief",
    "`AdaBelief`, `WeightDecay`, `LR` is AdaBelief",
    source="adabelief-pytorch 0.2.1, `adabelief_pytorch.AdaBelief`",
    groups=BELIEF,
)
def adabelief(groups: Any) -> Any:
    return official_adabelief(groups)


@optimizer(
    "adabelief_plain",
    "`AdaBelief(rectify=False)` is AdaBelief as in its paper",
    source="adabelief-pytorch 0.2.1, `adabelief_pytorch.AdaBelief`",
    ours=lambda **options: named("adabelief", rectify=False, **options),
    groups=BELIEF,
)
def adabelief_plain(groups: Any) -> Any:
    return official_adabelief(groups, rectify=False)


ADAN: Any = (
    {"lr": 0.05, "betas": (0.9, 0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.9, 0.9), "eps": 1e-3, "weight_decay": 0.01},
)


@optimizer(
    "adan",
    "`Adan`, `WeightDecay(proximal=True)`, `LR` is Adan",
    source="sail-sg/Adan 2c65bea, `adan.py`",
    groups=ADAN,
)
def adan(groups: Any) -> Any:
    return Alone(official_file("sail-sg/Adan", "adan.py").Adan, groups)


@optimizer(
    "adan_no_prox",
    "`Adan`, `WeightDecay`, `LR` is Adan with `no_prox=True`",
    source="sail-sg/Adan 2c65bea, `adan.py`",
    ours=lambda **options: named("adan", no_prox=True, **options),
    groups=ADAN,
)
def adan_no_prox(groups: Any) -> Any:
    made = official_file("sail-sg/Adan", "adan.py").Adan
    return Alone(functools.partial(made, no_prox=True), groups)


def official_adopt() -> Any:
    """The official optimizer, which calls a name that torch has no more."""
    module = official_file("iShohei220/adopt", "src/adopt/adopt.py")
    vars(module)["torch"]._utils.is_compiling = torch.compiler.is_compiling
    return module.ADOPT


@optimizer(
    "adopt",
    "`ADOPT(decouple=False)`, then `LR`, is ADOPT",
    source="iShohei220/adopt 6468572, `src/adopt/adopt.py`",
    groups=ADAM,
    constant={"clip_power": FIXED},
)
def adopt(groups: Any) -> Any:
    return official_adopt()(groups)


@optimizer(
    "adopt_decoupled",
    "`ADOPT(weight_decay=…)`, then `LR`, is ADOPT with `decouple=True`",
    source="iShohei220/adopt 6468572, `src/adopt/adopt.py`",
    ours=lambda **options: named("adopt", decouple=True, clip_power=None, **options),
    groups=ADAM,
    constant={"clip_power": FIXED},
    rtol={torch.float32: 2e-6, torch.float64: 1e-12},  # float64 is 3e-7 and, compiled, 9e-7 away
)
def adopt_decoupled(groups: Any) -> Any:
    return official_adopt()(groups, decouple=True, clip_lambda=None)


@optimizer(
    "came",
    "`CAME`, `WeightDecay`, `LR` is CAME",
    source="yangluo7/CAME e77c5c0, `came_pytorch/CAME.py`",
    groups=(
        {
            "lr": 0.05, "betas": (0.9, 0.8, 0.95), "eps": (1e-3, 1e-2), "clip_threshold": 1.0,
            "weight_decay": 0.1,
        },
        {
            "lr": 0.02, "betas": (0.8, 0.9, 0.9), "eps": (1e-6, 1e-3), "clip_threshold": 0.7,
            "weight_decay": 0.01,
        },
    ),
)  # fmt: skip
def came(groups: Any) -> Any:
    return official_file("yangluo7/CAME", "came_pytorch/CAME.py").CAME(groups, lr=0.05)


@optimizer(
    "laprop",
    "`LaProp`, `WeightDecay(afterwards=True)`, `LR` is LaProp whose decay is times lr",
    source="Z-T-WANG/LaProp-Optimizer a419916, `laprop.py`",
    groups=ADAM,
)
def laprop(groups: Any) -> Any:
    official: Any = official_file("Z-T-WANG/LaProp-Optimizer", "laprop.py").LaProp

    class Decayed(official):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["weight_decay"] *= group["lr"]
            with torch.no_grad():
                return super().step(closure)

    return Decayed(groups)


@optimizer(
    "yogi",
    "`WeightDecay`, then `Yogi`, then `LR`, is Yogi",
    source="torch-optimizer 0.3.0, `torch_optimizer.Yogi`",
    ours=lambda **options: named("yogi", initial_accumulator=0.3, **options),
    groups=ADAM,
)
def yogi(groups: Any) -> Any:
    return need("torch_optimizer").Yogi(groups, initial_accumulator=0.3)


@optimizer(
    "grams",
    "`Adam`, `Grams`, `WeightDecay`, `LR` is Grams",
    source="Gunale0926/Grams f91a375, `grams/src/grams.py`",
    groups=tuple({**group, "eps": 1e-30} for group in ADAM),
    constant={"eps": TINY},
)
def grams(groups: Any) -> Any:
    return official_file("Gunale0926/Grams", "grams/src/grams.py").Grams(groups)


@optimizer(
    "adamc",
    "`Adam`, `WeightDecay(follows_lr=True)`, `LR` is AdamC",
    source="pytorch_optimizer 4.1.0, `AdamC` of normalized layers",
    groups=(  # it knows one largest rate, which is that of the first steps
        {**ADAM[0], "eps": 1e-30},
        {**ADAM[1], "lr": 0.05, "eps": 1e-30},
    ),
    constant={"eps": TINY},
)
def adamc(groups: Any) -> Any:
    made = functools.partial(need("pytorch_optimizer").AdamC, lr=0.05)
    return Alone(made, [{**group, "normalized": True} for group in groups])


@rewriter(
    "grokfast",
    "`Grokfast` is Grokfast with an average, `gradfilter_ema`",
    source="ironjr/grokfast 93b2248, `grokfast.py`",
    ours=Grokfast,
    groups=({"alpha": 0.9, "lamb": 2.0}, {"alpha": 0.8, "lamb": 0.5}),
)
def grokfast(groups: Any) -> Any:
    """Their function is of a module, and knows the parameters of the first call alone."""
    filtered = official_file("ironjr/grokfast", "grokfast.py").gradfilter_ema
    known: dict[int, Any] = {}

    def rewrite() -> None:
        for group in groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                module = torch.nn.ParameterList([p])
                known[id(p)] = filtered(
                    module, known.get(id(p)), alpha=group["alpha"], lamb=group["lamb"]
                )

    return rewrite


@rewriter(
    "orthograd",
    "`OrthoGrad` is ⟂Grad",
    source="LucasPrietoAl/grokking-at-the-edge-of-numerical-stability 0cc9e8d, `orthograd.py`",
    ours=OrthoGrad,
    inputs=Inputs(shapes=tuple(shape for shape in ORDINARY if shape[0] != "b.one")),
)
def orthograd(groups: Any) -> Any:
    """Without the single number, of whose gradient it scales what rounding has left."""
    repository = "LucasPrietoAl/grokking-at-the-edge-of-numerical-stability"
    official = official_file(repository, "orthograd.py").OrthoGrad
    params = [p for group in groups for p in group["params"]]
    return lambda: official._orthogonalize_gradients(params)
