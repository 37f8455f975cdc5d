"""Averages, adaptive sizes, decay, the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.modules.rows.row import (
    BAD_ORD,
    BAD_SLICES,
    NO_SLICES,
    Bad,
    Row,
    at_least,
    number,
    scopes,
    share,
    shares,
)
from torchzero_clip import (
    EMA,
    LR,
    Adagrad,
    Adam,
    AdEMAMix,
    Cautious,
    Chain,
    Heads,
    Hyperball,
    Lion,
    Mars,
    MaxNorm,
    Momentum,
    Project,
    QKClip,
    RMSprop,
    Scale,
    StableAdam,
    Warmup,
    WeightDecay,
)

inf, nan = math.inf, math.nan

STEPS: list[Bad] = [
    ({"target": "grad"}, ValueError, "target must be 'update', the step that is subtracted, got"),
]


def heads(name: str, p: Tensor) -> Heads | None:
    """Two heads of queries in every matrix with an even number of rows, two of keys in others."""
    if p.dim() < 2 or not len(p) or len(p) % 2:
        return None
    maxima = torch.arange(400.0, 0.0, -350.0, device=p.device)  # 400 and 50
    return Heads("query" if len(p) > 2 else "key", maxima, last=len(p) // 4)


ROWS = [
    Row(
        LR,
        good={"0.1": lambda: LR(0.1), "tensor": lambda: LR(torch.tensor(0.1))},
        args={"lr": 0.1},
        bad=at_least("lr", 0),
        loose={"1": lambda: LR(1.0)},
        per_entry=True,
    ),
    Row(
        Scale,
        good={"-1": lambda: Scale(-1), "0.3": lambda: Scale(0.3)},
        args={"factor": 1.0},
        bad=[
            *number("factor", nan, words="a number"),
            *number("factor", "1", None, error=TypeError, words="a number"),
        ],
        loose={"1": lambda: Scale(1.0)},
        per_entry=True,
    ),
    Row(
        Adam,
        good={
            "default": Adam,
            "amsgrad": lambda: Adam((0.5, 0.9), amsgrad=True),
            "no averages": lambda: Adam((0.0, 0.0), 0.1),
        },
        bad=[*shares("betas"), *at_least("eps", 0)],
        memory="free",
        per_entry=True,
        squares=True,
        keeps=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    Row(
        AdEMAMix,
        good={
            "default": AdEMAMix,
            "warm": lambda: AdEMAMix((0.5, 0.9, 0.99), 5.0, alpha_warmup=3, beta3_warmup=2),
            "no average": lambda: AdEMAMix((0.0, 0.9, 0.99), beta3_warmup=3),
        },
        bad=[
            (
                {"betas": (0.9, 0.9, 1.0)},
                ValueError,
                "betas must be 3 numbers, each at least 0 and",
            ),
            (
                {"betas": (nan, 0.9, 0.9)},
                ValueError,
                "betas must be 3 numbers, each at least 0 and",
            ),
            ({"betas": (0.9, 0.9)}, ValueError, "betas must be 3 numbers"),
            ({"betas": 0.9}, TypeError, "betas must be 3 numbers"),
            *at_least("alpha", 0),
            *at_least("eps", 0),
            *number("alpha_warmup", 0, -1, words="an integer at least 1 or None"),
            *number("beta3_warmup", 0, -1, words="an integer at least 1 or None"),
            *number("alpha_warmup", 1.5, error=TypeError, words="an integer at least 1 or None"),
            *number("beta3_warmup", "1", error=TypeError, words="an integer at least 1 or None"),
        ],
        memory="free",
        per_entry=True,
        squares=True,
        loops=1,
        keeps=("exp_avg", "exp_avg_slow", "exp_avg_sq"),
    ),
    Row(
        Mars,
        good={"default": Mars, "strong": lambda: Mars(0.5, 2.0)},
        bad=[*share("beta"), *at_least("gamma", 0)],
        loose={"0": lambda: Mars(gamma=0.0)},
        memory="free",
        per_entry=True,
        keeps=("previous",),
    ),
    Row(
        StableAdam,
        good={
            "default": StableAdam,
            "decay": lambda: StableAdam((0.5, 0.9), 1e-3, 0.1),
        },
        bad=[
            *shares("betas"),
            *number("eps", 0.0, -1.0, nan, words="a number above 0"),
            *at_least("weight_decay", 0),
        ],
        memory="free",
        squares=True,
        adds=True,
        keeps=("exp_avg", "exp_avg_sq"),
    ),
    Row(
        Momentum,
        good={
            "default": Momentum,
            "nesterov": lambda: Momentum(0.8, nesterov=True),
            "dampening": lambda: Momentum(0.8, dampening=0.3),
            "both": lambda: Momentum(0.8, True, 0.3),
            "none": lambda: Momentum(0.0),
        },
        bad=[
            *at_least("momentum", 0),
            *number("dampening", 1.5, nan, words="a number at most 1"),
            *number("dampening", "0", error=TypeError, words="a number at most 1"),
        ],
        loose={"none": lambda: Momentum(0.0)},
        memory="free",
        per_entry=True,
        keeps=("momentum_buffer",),
    ),
    Row(
        RMSprop,
        good={
            "default": RMSprop,
            "centered": lambda: RMSprop(0.9, 1e-3, centered=True),
            "momentum": lambda: RMSprop(0.9, 1e-3, 0.5),
            "both": lambda: RMSprop(0.9, 1e-3, 0.5, True),
        },
        bad=[*share("alpha"), *at_least("eps", 0), *at_least("momentum", 0)],
        memory="free",
        per_entry=True,
        squares=True,
        keeps=("square_avg", "grad_avg", "momentum_buffer"),
    ),
    Row(
        Adagrad,
        good={"default": Adagrad, "decay": lambda: Adagrad(0.1, 0.5, 1e-3)},
        bad=[
            *at_least("lr_decay", 0),
            *at_least("initial_accumulator_value", 0),
            *at_least("eps", 0),
        ],
        memory="free",
        per_entry=True,
        squares=True,
        keeps=("sum",),
    ),
    Row(
        Lion,
        good={"default": Lion, "short": lambda: Lion((0.5, 0.6))},
        bad=shares("betas"),
        memory="free",
        per_entry=True,
        keeps=("exp_avg",),
    ),
    Row(
        EMA,
        good={
            "default": EMA,
            "debias": lambda: EMA(0.5, debias=True),
            "nesterov": lambda: EMA(0.5, nesterov=True),
        },
        bad=[
            *share("beta"),
            ({"debias": True, "nesterov": True}, ValueError, "debias=True and nesterov=True excl"),
        ],
        loose={"none": lambda: EMA(0.0), "none ahead": lambda: EMA(0.0, nesterov=True)},
        memory="free",
        per_entry=True,
        keeps=("ema",),
    ),
    Row(
        WeightDecay,
        good={
            "0.1": lambda: WeightDecay(0.1),
            "cautious": lambda: WeightDecay(0.1, cautious=True),
        },
        args={"weight_decay": 0.1},
        bad=at_least("weight_decay", 0),
        loose={"none": lambda: WeightDecay(0.0)},
        per_entry=True,
        adds=True,
    ),
    Row(
        Cautious,
        good={
            "alone": Cautious,
            "after momentum": lambda: Chain(Momentum(0.9), Cautious()),
        },
        loose={"alone": Cautious},
        squares=True,
        loops=3,
    ),
    Row(
        Warmup,
        good={"3": lambda: Warmup(3), "1": lambda: Warmup(1)},
        args={"steps": 3},
        bad=[
            *number("steps", 0, -1, words="an integer at least 1"),
            *number("steps", 1.5, "3", None, True, error=TypeError, words="an integer at least 1"),
        ],
        loose={"1": lambda: Warmup(1)},
        memory="free",
        per_entry=True,
    ),
    Row(
        MaxNorm,
        good={
            **scopes(lambda **kw: MaxNorm(0.5, **kw)),
            "largest": lambda: MaxNorm(0.5, inf),
        },
        args={"max_norm": 1.0},
        bad=[*at_least("max_norm", 0), *BAD_ORD, *BAD_SLICES, *STEPS],
        loose={"1e9": lambda: MaxNorm(1e9)},
        complex="turns",
        adds=True,
        aims=False,
        loops=1,
    ),
    Row(
        Hyperball,
        good=scopes(lambda dim=None: Hyperball(dim), slices=False),
        bad=[*NO_SLICES, *STEPS],
        memory="free",
        complex="turns",
        adds=True,
        aims=False,
        loops=1,
    ),
    Row(
        Project,
        good={"relu": lambda: Project(torch.relu), "tanh": lambda: Project(torch.tanh)},
        args={"fn": torch.relu},
        bad=[({"fn": 2.0}, TypeError, "fn must be a function, got 2.0"), *STEPS],
        loose={"clone": lambda: Project(torch.clone)},
        complex="free",
        adds=True,
        aims=False,
        per_entry=True,
        loops=6,
    ),
    Row(
        QKClip,
        good={"heads": lambda: QKClip(heads), "low": lambda: QKClip(heads, 10.0, 0.2)},
        args={"max_logits": heads},
        bad=[
            ({"max_logits": 400.0}, TypeError, "max_logits must be a function, got 400.0"),
            *number("tau", 0.0, -1.0, nan, words="a number above 0"),
            *number("alpha", -0.1, 1.1, nan, words="a number at least 0 and at most 1"),
            *STEPS,
        ],
        loose={"1e9": lambda: QKClip(heads, 1e9)},
        complex="refuses",
        matrices=True,
        adds=True,
        aims=False,
        loops=20,
    ),
]
