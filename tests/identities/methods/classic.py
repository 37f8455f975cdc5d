"""The methods of torch.optim."""

from __future__ import annotations

from typing import Any

import torch

from tests.identities.identity import optimizer
from torchzero_clip import LR, Adam, Chain, Momentum, RMSprop, Scale, WeightDecay, named

DECAYED: Any = ({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.01})
"""The groups of most: with decay, and with other values."""


@optimizer("sgd", "`WeightDecay`, then `LR`, is SGD", source="torch.optim.SGD", groups=DECAYED)
def sgd(groups: Any) -> Any:
    return torch.optim.SGD(groups)


@optimizer(
    "sgd_dampening",
    "`WeightDecay`, then `Momentum` with `dampening`, then `LR`, is SGD with momentum",
    source="torch.optim.SGD",
    ours=lambda **options: named("sgd", **options),
    groups=(
        {**DECAYED[0], "momentum": 0.9, "dampening": 0.4},
        {**DECAYED[1], "momentum": 0.8, "dampening": -0.1},
    ),
)
def sgd_dampening(groups: Any) -> Any:
    return torch.optim.SGD(groups)


@optimizer(
    "sgd_nesterov",
    "`WeightDecay`, then `Momentum(nesterov=True)`, then `LR`, is SGD with Nesterov's momentum",
    source="torch.optim.SGD",
    ours=lambda **options: named("sgd", nesterov=True, **options),
    groups=({**DECAYED[0], "momentum": 0.9}, {**DECAYED[1], "momentum": 0.8}),
    constant={"dampening": "torch does not accept it together with `nesterov`"},
)
def sgd_nesterov(groups: Any) -> Any:
    return torch.optim.SGD(groups, momentum=0.9, nesterov=True)


@optimizer(
    "adagrad",
    "`WeightDecay`, then `Adagrad`, then `LR`, is Adagrad",
    source="torch.optim.Adagrad",
    groups=(
        {**DECAYED[0], "lr_decay": 0.1, "eps": 1e-10, "initial_accumulator_value": 0.3},
        {**DECAYED[1], "lr_decay": 0.0, "eps": 1e-3},
    ),
)
def adagrad(groups: Any) -> Any:
    return torch.optim.Adagrad(groups, initial_accumulator_value=0.3)


@optimizer(
    "rmsprop",
    "`WeightDecay`, then `RMSprop`, then `LR`, is RMSprop",
    source="torch.optim.RMSprop",
    groups=(
        {**DECAYED[0], "alpha": 0.9, "eps": 1e-8},
        {**DECAYED[1], "alpha": 0.99, "eps": 1e-3},
    ),
)
def rmsprop(groups: Any) -> Any:
    return torch.optim.RMSprop(groups)


@optimizer(
    "rmsprop_centered",
    "`RMSprop(centered=True, momentum=…)` is torch's, centered and with momentum",
    source="torch.optim.RMSprop",
    ours=lambda **options: named("rmsprop", momentum=0.8, centered=True, **options),
    groups=(
        {**DECAYED[0], "alpha": 0.9, "eps": 1e-3},
        {**DECAYED[1], "alpha": 0.95, "eps": 1e-2},
    ),
)
def rmsprop_centered(groups: Any) -> Any:
    return torch.optim.RMSprop(groups, momentum=0.8, centered=True)


@optimizer(
    "rmsprop_momentum",
    "`WeightDecay`, `RMSprop`, `Momentum`, `LR` is RMSprop with momentum",
    source="torch.optim.RMSprop",
    ours=lambda lr, weight_decay, alpha, eps, momentum: Chain(
        WeightDecay(weight_decay), RMSprop(alpha, eps), Momentum(momentum), LR(lr)
    ),
    groups=(
        {**DECAYED[0], "alpha": 0.9, "eps": 1e-8, "momentum": 0.8},
        {**DECAYED[1], "alpha": 0.8, "eps": 1e-3, "momentum": 0.7},
    ),
    constant={"dampening": "torch's RMSprop has no such option"},
)
def rmsprop_momentum(groups: Any) -> Any:
    return torch.optim.RMSprop(groups)


@optimizer(
    "adam",
    "`WeightDecay`, then `Adam`, then `LR`, is Adam with an L2 penalty",
    source="torch.optim.Adam",
    groups=(
        {**DECAYED[0], "betas": (0.9, 0.99), "eps": 1e-8},
        {**DECAYED[1], "betas": (0.8, 0.95), "eps": 1e-3},
    ),
)
def adam(groups: Any) -> Any:
    return torch.optim.Adam(groups)


@optimizer(
    "amsgrad",
    "`Adam(amsgrad=True)` is AMSGrad",
    source="torch.optim.Adam",
    ours=lambda **options: named("adam", amsgrad=True, **options),
    groups=(
        {**DECAYED[0], "betas": (0.9, 0.8), "eps": 1e-8},
        {**DECAYED[1], "betas": (0.8, 0.7), "eps": 1e-3},
    ),
)
def amsgrad(groups: Any) -> Any:
    return torch.optim.Adam(groups, amsgrad=True)


@optimizer(
    "adamw",
    "`Adam`, then `WeightDecay`, then `LR`, is AdamW",
    source="torch.optim.AdamW",
    groups=(
        {**DECAYED[0], "betas": (0.9, 0.99), "eps": 1e-8},
        {**DECAYED[1], "betas": (0.8, 0.95), "eps": 1e-3},
    ),
)
def adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups)


@optimizer(
    "maximize",
    "`Scale(-1)` in front of AdamW maximises",
    source="torch.optim.AdamW",
    ours=lambda **options: Chain(Scale(-1), named("adamw", **options)),
    groups=(
        {**DECAYED[0], "betas": (0.9, 0.99), "eps": 1e-8},
        {**DECAYED[1], "betas": (0.8, 0.95), "eps": 1e-3},
    ),
    constant={"factor": "it changes the sign"},
)
def maximize(groups: Any) -> Any:
    return torch.optim.AdamW(groups, maximize=True)


@optimizer(
    "scale",
    "`Scale(s)` in front of `LR(lr)` is a learning rate of s · lr",
    source="torch.optim.Adam",
    ours=lambda lr, factor, betas, eps: Chain(Adam(betas, eps), Scale(factor), LR(lr)),
    groups=(
        {"lr": 0.05, "factor": 0.3, "betas": (0.9, 0.99), "eps": 1e-8},
        {"lr": 0.02, "factor": 2.0, "betas": (0.8, 0.95), "eps": 1e-3},
    ),
)
def scale(groups: Any) -> Any:
    class Scaled(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] *= group["factor"]
            return super().step(closure)

    return Scaled(groups)


def in_double(make: Any) -> Any:
    """torch's optimizer, whose single numbers are float64 where its parameters are.

    torch keeps μ of NAdam and η of ASGD in the default dtype.
    """

    def theirs(groups: Any) -> Any:
        class Double(make):
            def step(self, closure: Any = None) -> Any:
                torch.set_default_dtype(self.param_groups[0]["params"][0].dtype)
                try:
                    return super().step(closure)
                finally:
                    torch.set_default_dtype(torch.float32)

        return Double(groups)

    return theirs


NADAM: Any = (
    {**DECAYED[0], "betas": (0.9, 0.99), "eps": 1e-8, "momentum_decay": 0.1},
    {**DECAYED[1], "betas": (0.8, 0.95), "eps": 1e-3, "momentum_decay": 4e-3},
)


@optimizer(
    "nadam",
    "`WeightDecay`, then `NAdam`, then `LR`, is NAdam",
    source="torch.optim.NAdam",
    groups=NADAM,
)
def nadam(groups: Any) -> Any:
    return in_double(torch.optim.NAdam)(groups)


@optimizer(
    "nadamw",
    "`NAdam`, then `WeightDecay`, then `LR`, is NAdam with decoupled decay",
    source="torch.optim.NAdam",
    ours=lambda **options: named("nadam", decoupled_weight_decay=True, **options),
    groups=NADAM,
)
def nadamw(groups: Any) -> Any:
    for group in groups:
        group["decoupled_weight_decay"] = True
    return in_double(torch.optim.NAdam)(groups)


RADAM: Any = (  # ρ grows past 5 in the seventh step here, and soon there
    {**DECAYED[0], "betas": (0.9, 0.9), "eps": 1e-8},
    {**DECAYED[1], "betas": (0.8, 0.99), "eps": 1e-3},
)


@optimizer(
    "radam",
    "`WeightDecay`, then `RAdam`, then `LR`, is RAdam",
    source="torch.optim.RAdam",
    groups=RADAM,
)
def radam(groups: Any) -> Any:
    return torch.optim.RAdam(groups)


@optimizer(
    "radam_decoupled",
    "`RAdam`, then `WeightDecay`, then `LR`, is RAdam with decoupled decay",
    source="torch.optim.RAdam",
    ours=lambda **options: named("radam", decoupled_weight_decay=True, **options),
    groups=RADAM,
)
def radam_decoupled(groups: Any) -> Any:
    for group in groups:
        group["decoupled_weight_decay"] = True
    return torch.optim.RAdam(groups)


@optimizer(
    "adamax",
    "`WeightDecay`, then `Adamax`, then `LR`, is Adamax",
    source="torch.optim.Adamax",
    groups=(
        {**DECAYED[0], "betas": (0.9, 0.8), "eps": 1e-8},
        {**DECAYED[1], "betas": (0.8, 0.7), "eps": 1e-2},
    ),
)
def adamax(groups: Any) -> Any:
    return torch.optim.Adamax(groups)


@optimizer(
    "adadelta",
    "`WeightDecay`, then `Adadelta`, then `LR`, is Adadelta",
    source="torch.optim.Adadelta",
    groups=(
        {"lr": 1.0, "weight_decay": 0.1, "rho": 0.9, "eps": 1e-3},
        {"lr": 0.5, "weight_decay": 0.01, "rho": 0.8, "eps": 1e-2},
    ),
)
def adadelta(groups: Any) -> Any:
    return torch.optim.Adadelta(groups)


@optimizer(
    "rprop",
    "`Rprop` is Rprop",
    source="torch.optim.Rprop",
    groups=(
        {"lr": 0.05, "etas": (0.5, 1.6), "step_sizes": (0.03, 0.2)},
        {"lr": 0.02, "etas": (0.6, 1.8), "step_sizes": (1e-3, 0.1)},
    ),
)
def rprop(groups: Any) -> Any:
    return torch.optim.Rprop(groups)


@optimizer(
    "asgd",
    "`WeightDecay`, then `ASGD`, is ASGD",
    source="torch.optim.ASGD",
    groups=(
        {**DECAYED[0], "lambd": 0.3, "alpha": 0.75, "t0": 5.0},
        {**DECAYED[1], "lambd": 0.1, "alpha": 0.6, "t0": 8.0},
    ),
)
def asgd(groups: Any) -> Any:
    return in_double(torch.optim.ASGD)(groups)


@optimizer(
    "adafactor",
    "`Adafactor`, then `WeightDecay`, then `LR`, is Adafactor",
    source="torch.optim.Adafactor",
    groups=(
        {**DECAYED[0], "lr": 0.5, "beta2_decay": -0.8, "eps": (0.3, 0.2), "d": 1.5},
        {**DECAYED[1], "lr": 0.2, "beta2_decay": -0.5, "eps": (1e-3, 0.5), "d": 1.8},
    ),
)
def adafactor(groups: Any) -> Any:
    return torch.optim.Adafactor(groups)


@optimizer(
    "adafactor_plain",
    "`Adafactor`, then `WeightDecay`, then `LR`, is Adafactor with the spacing of numbers as eps",
    source="torch.optim.Adafactor",
    ours=lambda **options: named("adafactor", **options),
    groups=(
        {**DECAYED[0], "eps": (None, 1e-3), "d": 1.0, "beta2_decay": -0.8},
        {**DECAYED[1], "eps": (None, 0.5), "d": 3.0, "beta2_decay": -0.5},
    ),
    constant={"beta2_decay": "another identity changes it", "d": "another identity changes it"},
)
def adafactor_plain(groups: Any) -> Any:
    return torch.optim.Adafactor(groups)
