"""Weights for evaluation, compared with those of training."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.identities.follow import need, official_file
from tests.identities.identity import FLOAT32, optimizer
from tests.identities.inputs import Inputs
from torchzero_clip import LR, Adam, Chain, Lookahead, WeightEMA

STEPS_OF_A_GROUP = Inputs(gaps=False)  # theirs counts them, ours those of a parameter
FREE: Any = (
    {"lr": 0.05, "weight_decay": 0.1, "r": 0.0, "weight_lr_power": 2.0},
    {"lr": 0.02, "weight_decay": 0.01, "r": 0.5, "weight_lr_power": 1.0},
)
ADAM: Any = (
    {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0},
)


def schedule_free(name: str, groups: Any) -> Any:
    """One of the official optimizers, in training."""
    opt = getattr(need("schedulefree"), name)(groups)
    opt.train()
    return opt


@optimizer(
    "schedule_free_adamw",
    "`Adam(momentum=False)`, `WeightDecay`, `LR`, `ScheduleFree` is Schedule-Free AdamW",
    source="schedulefree 1.4.1, `AdamWScheduleFree`",
    groups=(
        {**FREE[0], "betas": (0.9, 0.99), "eps": 1e-8},
        {**FREE[1], "betas": (0.7, 0.95), "eps": 1e-3},
    ),
    constant={"beta": "it is None here, and equals the first beta"},
    inputs=STEPS_OF_A_GROUP,
    evaluates=True,
)
def schedule_free_adamw(groups: Any) -> Any:
    return schedule_free("AdamWScheduleFree", groups)


@optimizer(
    "schedule_free_radam",
    "`Adam(momentum=False)`, `WeightDecay`, `LR`, `ScheduleFree(rectified=True)` is "
    "Schedule-Free RAdam",
    source="schedulefree 1.4.1, `RAdamScheduleFree`",
    groups=(
        {**FREE[0], "betas": (0.9, 0.99), "eps": 1e-8},
        {**FREE[1], "betas": (0.7, 0.95), "eps": 1e-3},
    ),
    constant={"beta": "it is None here, and equals the first beta"},
    inputs=STEPS_OF_A_GROUP,
    evaluates=True,
)
def schedule_free_radam(groups: Any) -> Any:
    return schedule_free("RAdamScheduleFree", groups)


@optimizer(
    "schedule_free_sgd",
    "`WeightDecay`, `LR`, `ScheduleFree` is Schedule-Free SGD",
    source="schedulefree 1.4.1, `SGDScheduleFree`",
    groups=({**FREE[0], "momentum": 0.9}, {**FREE[1], "momentum": 0.6}),
    keys={"beta": "momentum"},
    evaluates=True,
)
def schedule_free_sgd(groups: Any) -> Any:
    opt = need("schedulefree").SGDScheduleFree(groups)
    opt.train()
    return opt


class Shown(torch.optim.Optimizer):
    """What official optimizers here have: `eval`, with which `average` lies in the weights."""

    def average(self, p: Tensor) -> Tensor:
        raise NotImplementedError

    def eval(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.kept = [(p, p.detach().clone()) for p in params]
        for p in params:
            p.detach().copy_(self.average(p))

    def train(self) -> None:
        for p, kept in self.kept:
            p.detach().copy_(kept)


@optimizer(
    "ema_adamw",
    "`Adam`, `WeightDecay`, `LR`, `WeightEMA` is AdamW with the average of torch",
    source="torch.optim.AdamW, torch.optim.swa_utils.get_ema_multi_avg_fn",
    groups=tuple({**group, "decay": d} for group, d in zip(ADAM, (0.9, 0.6), strict=True)),
    inputs=Inputs(gaps=False),  # its average moves where a parameter has no gradient
    evaluates=True,
)
def ema_adamw(groups: Any) -> Any:
    class EMAAdamW(Shown, torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "average" not in state:
                        state["average"] = p.detach().clone()
                    else:
                        get_ema_multi_avg_fn(group["decay"])([state["average"]], [p.detach()], 1)

        def average(self, p: Tensor) -> Tensor:
            return self.state[p]["average"]

    return EMAAdamW(groups)


@optimizer(
    "ema_pytorch",
    "`WeightEMA` is the EMA of ema_pytorch, whose own warm-up is turned off",
    source="ema_pytorch 0.8.3, `EMA`",
    ours=lambda lr, decay: Chain(LR(lr), WeightEMA(decay)),
    groups=({"lr": 0.05, "decay": 0.9}, {"lr": 0.02}),
    constant={"decay": "the reference has one value for all parameters"},
    inputs=Inputs(gaps=False),  # its average moves where a parameter has no gradient
    evaluates=True,
    rtol=FLOAT32,  # its decay is one
)
def ema_pytorch(groups: Any) -> Any:
    params = [p for group in groups for p in group["params"]]
    model = torch.nn.ParameterList(params)
    ema = need("ema_pytorch").EMA(
        model, beta=0.9, min_value=0.9, update_after_step=-1, update_every=1, use_foreach=False
    )

    class WithEMA(Shown, torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            ema.update()

        def average(self, p: Tensor) -> Tensor:
            (place,) = [i for i, one in enumerate(params) if one is p]
            shown: Tensor = ema.ema_model[place]
            return shown

    return WithEMA(groups)


@optimizer(
    "ema_diffusers",
    "`WeightEMA(warmup=True)` is the EMAModel of diffusers, here in every other step",
    source="diffusers 0.42.1, `training_utils.EMAModel`",
    ours=lambda lr, decay: Chain(LR(lr), WeightEMA(decay, every=2, warmup=True)),
    groups=({"lr": 0.05, "decay": 0.45}, {"lr": 0.02}),
    constant={"decay": "the reference has one value for all parameters"},
    inputs=Inputs(gaps=False),  # its average moves where a parameter has no gradient
    evaluates=True,
)
def ema_diffusers(groups: Any) -> Any:
    params = [p for group in groups for p in group["params"]]
    need("diffusers")
    ema = importlib.import_module("diffusers.training_utils").EMAModel(params, decay=0.45)
    steps = itertools.count()

    class WithEMA(Shown, torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            if next(steps) % 2 == 0:
                ema.step(params)

        def average(self, p: Tensor) -> Tensor:
            (place,) = [i for i, one in enumerate(params) if one is p]
            shown: Tensor = ema.shadow_params[place]
            return shown

    return WithEMA(groups)


@optimizer(
    "lookahead_adam",
    "`WeightDecay`, `Adam`, `LR`, `Lookahead` is Lookahead around Adam",
    source="pytorch_optimizer 4.1.0, `Lookahead`",
    groups=tuple({**group, "alpha": 0.3, "k": 6} for group in ADAM),
    constant={"alpha": "the reference has one value for all groups"},
    inputs=STEPS_OF_A_GROUP,
    evaluates=True,
)
def lookahead_adam(groups: Any) -> Any:
    official = need("pytorch_optimizer").Lookahead

    class Around(official):  # type: ignore[misc]
        def eval(self) -> None:
            self.backup_and_load_cache()

        def train(self) -> None:
            self.clear_and_load_backup()

    return Around(torch.optim.Adam(groups), k=6, alpha=0.3)


@optimizer(
    "lookahead_timm",
    '`Lookahead(start="sync")` is the Lookahead of timm',
    source="huggingface/pytorch-image-models aa4b585, `timm/optim/lookahead.py`",
    ours=lambda lr, betas, eps, lookahead_alpha, k: Chain(
        Adam(betas, eps), LR(lr), Lookahead(k, lookahead_alpha, start="sync")
    ),
    groups=(
        {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "lookahead_alpha": 0.5, "k": 4},
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "lookahead_alpha": 0.8},
    ),
    keys={"alpha": "lookahead_alpha"},
    inputs=STEPS_OF_A_GROUP,
)
def lookahead_timm(groups: Any) -> Any:
    module = official_file("huggingface/pytorch-image-models", "timm/optim/lookahead.py")
    return module.Lookahead(torch.optim.Adam(groups), k=4)
