"""Which parameters, which steps: masks, partitions, guards; and chains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.modules.rows.row import BAD_SLICES, Bad, Row, scopes
from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    Adam,
    Carry,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Freeze,
    Graft,
    Guard,
    Identity,
    Lambda,
    Masked,
    Momentum,
    Noise,
    Normalize,
    Parallel,
    Partition,
    Reset,
    Scale,
    SkipLarge,
    SkipSpike,
    Steepest,
    TensorList,
    WeightDecay,
    When,
)

inf, nan = math.inf, math.nan

INNER: list[Bad] = [
    ({"tfm": "Scale"}, TypeError, "tfm must be a Transform, got 'Scale'"),
    ({"tfm": Scale}, TypeError, "tfm must be a Transform, got"),
    ({"target": "grad"}, ValueError, "target= must be 'update', got 'grad': pass target="),
]


KEEPS: list[Bad] = [
    ({"tfm": Freeze(lambda name, p: True)}, ValueError, "must return an update for every param"),
    ({"tfm": Chain(Scale(1), Accumulate(2))}, ValueError, "must return an update for every param"),
    ({"tfm": Guard()}, ValueError, "must return an update for every parameter"),
    ({"tfm": ClipNorm(1, target="grad")}, ValueError, "must return an update for every parameter"),
]


def is_weight(name: str, p: Tensor) -> bool:
    return name.endswith("weight")


def is_bias(name: str, p: Tensor) -> bool:
    return name.endswith("bias")


def kind(name: str, p: Tensor) -> str:
    return "weight" if is_weight(name, p) else "other"


def never(*args: Any) -> bool:
    return False


def odd(step: int) -> bool:
    return step % 2 == 1


def total(u: Mapping[str, TensorList]) -> TensorList:
    first, *others = u.values()
    for other in others:
        first.add_(other)
    return first


ROWS = [
    Row(
        Chain,
        good={
            "empty": Chain,
            "nested": lambda: Chain(ClipNorm(0.5), Chain(Adam(), WeightDecay(0.1), name="inner")),
            "twice": lambda: Chain(ClipNorm(0.5), ClipNormGrowth(), ClipNorm(0.3, name="last")),
        },
        bad=[],
        loose={"empty": Chain, "one": lambda: Chain(ClipNorm(1e9), name="one")},
        squares=True,
        adds=True,
        aims=False,
    ),
    Row(
        Chain,
        good={
            "decay with lr": lambda: Chain(WeightDecay(0.1, follows_lr=True), LR(0.5)),
            "decay afterwards": lambda: Chain(WeightDecay(0.1, afterwards=True), LR(0.5)),
            "cautious decay with lr": lambda: Chain(
                WeightDecay(0.1, cautious=True, follows_lr=True), LR(0.5)
            ),
        },
        memory="free",
        per_entry=True,
        adds=True,
        aims=False,
    ),
    Row(
        Masked,
        good={
            "norm": lambda: Masked(ClipNorm(0.5), is_weight),
            "all weights": lambda: Masked(ClipNorm(0.5, dim="global"), is_weight),
            "growth": lambda: Masked(ClipNormGrowth(mul=1.1), is_weight),
            "chain": lambda: Masked(Chain(ClipNorm(0.5), EMA(0.5)), is_weight),
        },
        args={"tfm": Scale(2.0), "where": lambda name, p: True},
        bad=INNER,
        loose={
            "nothing": lambda: Masked(Scale(2.0), never),
            "no clip": lambda: Masked(ClipNorm(1e9), is_weight),
        },
        scope={"all weights": "mixed"},
        aims=False,
    ),
    Row(
        Partition,
        good={
            "two": lambda: Partition({"weight": ClipNorm(0.5), "other": EMA(0.5)}, kind),
            "chain": lambda: Partition(
                {"weight": Chain(ClipNorm(0.5), Momentum()), "other": Scale(2.0)}, kind
            ),
            "names": lambda: Partition(
                {"weight": ClipNorm(0.5), "other": Scale(2.0)},
                {"*.weight": "weight", "*": "other"},
            ),
        },
        args={"transforms": {"other": Scale(2.0)}, "labels": lambda name, p: "other"},
        bad=[
            (
                {"transforms": [Scale(2.0)]},
                TypeError,
                "transforms must be a dict from labels to",
            ),
            ({"transforms": {"a": "Scale"}}, TypeError, "transforms must be a dict from labels to"),
            ({"labels": "weight"}, TypeError, "labels= must be a function or a dict, got"),
            (
                {"labels": {"a | ": "other"}},
                ValueError,
                "the keys of labels must be names or patte",
            ),
            ({"labels": {3: "other"}}, ValueError, "the keys of labels must be names or patterns"),
            ({"target": "grad"}, ValueError, "target= must be 'update', got 'grad': pass target="),
        ],
        loose={"both": lambda: Partition({"weight": ClipNorm(1e9), "other": Scale(1.0)}, kind)},
        aims=False,
    ),
    Row(
        Parallel,
        good={
            "two": lambda: Parallel({"fast": EMA(0.5), "slow": EMA(0.9)}, total),
            "clips": lambda: Parallel({"a": ClipNorm(0.5), "b": Identity()}, total),
            "chain": lambda: Parallel({"a": Chain(ClipNorm(0.5), Momentum()), "b": Adam()}, total),
        },
        args={"transforms": {"a": Scale(2.0)}, "merge": total},
        squares=True,
        bad=[
            ({"transforms": [Scale(2.0)]}, TypeError, "transforms must be a dict from names to"),
            ({"transforms": {"a": "Scale"}}, TypeError, "transforms must be a dict from names to"),
            ({"transforms": {}}, TypeError, "transforms must be a dict from names to"),
            ({"transforms": {"a": Freeze(never)}}, ValueError, "transforms must return an update"),
            ({"target": "grad"}, ValueError, "target= must be 'update', got 'grad': pass target="),
        ],
        loose={"one": lambda: Parallel({"a": ClipNorm(1e9)}, total)},
        memory="free",
        complex="free",
        aims=False,
    ),
    Row(
        Graft,
        good={
            **scopes(lambda **kw: Graft(EMA(0.5), Identity(), **kw)),
            "two averages": lambda: Graft(EMA(0.5), Momentum()),
            "chain": lambda: Graft(Chain(ClipNorm(0.5), Scale(2.0)), Momentum(), 1),
        },
        args={"norm_of": Scale(2.0), "direction_of": Scale(-1.0)},
        bad=[
            *BAD_SLICES,
            ({"norm_of": "Adam"}, TypeError, "norm_of must be a Transform, got 'Adam'"),
            ({"direction_of": Adam}, TypeError, "direction_of must be a Transform, got <class"),
            ({"norm_of": Guard()}, ValueError, "norm_of must return an update for every param"),
            ({"direction_of": Accumulate(2)}, ValueError, "direction_of must return an update"),
            ({"target": "grad"}, ValueError, "target= must be 'update', got 'grad': pass target="),
        ],
        memory="free",
        complex="free",
        aims=False,
        measures=2,
    ),
    Row(
        Steepest,
        good={
            **scopes(lambda **kw: Steepest(Normalize(**kw), **kw)),
            "average": lambda: Steepest(Chain(Momentum(0.5), Normalize())),
            "chain": lambda: Steepest(Chain(ClipNorm(0.5), Scale(-2.0))),
        },
        args={"tfm": Scale(2.0)},
        bad=[*BAD_SLICES, *INNER, *KEEPS],
        memory="free",
        complex="free",
        aims=False,
        loops=4,
        measures=2,
    ),
    Row(
        When,
        good={
            "odd": lambda: When(odd, ClipNorm(0.5)),
            "average": lambda: When(odd, EMA(0.5)),
        },
        args={"condition": lambda step: True, "tfm": Scale(2.0)},
        bad=INNER,
        loose={"never": lambda: When(never, Scale(2.0))},
        memory="free",
        graphs=4,
        aims=False,
    ),
    Row(
        Reset,
        good={
            "average": lambda: Reset(EMA(0.5), 3, 2),
            "chain": lambda: Reset(Chain(ClipNormGrowth(dim="global"), Adam()), 3),
            "keep": lambda: Reset(Adam(), 2, 1, ("step",)),
        },
        args={"tfm": Scale(2.0), "every": 3},
        bad=[
            *INNER,
            ({"keep": "step"}, TypeError, "keep= must be a sequence of state names, got 's"),
            ({"keep": (1,)}, TypeError, "keep= must be a sequence of state names, got (1"),
        ],
        loose={"identity": lambda: Reset(Identity(), 2)},
        scope={"chain": "mixed"},
        loops=20,  # in the steps that begin anew
        memory="free",
        squares=True,
        graphs=5,
        aims=False,
    ),
    Row(
        Carry,
        good={
            "value": lambda: Carry(ClipValue(0.5)),
            "norm": lambda: Carry(ClipNorm(0.5)),
            "chain": lambda: Carry(Chain(ClipNormGrowth(mul=1.1), Scale(0.5))),
        },
        args={"tfm": Scale(2.0)},
        bad=[*INNER, *KEEPS],
        loose={"no clip": lambda: Carry(ClipNorm(1e9))},
        memory="free",
        complex="free",
        adds=True,  # after a cut, what was cut off
        aims=False,
        loops=5,
        keeps=("carried",),
    ),
    Row(
        Accumulate,
        good={"2": lambda: Accumulate(2), "1": lambda: Accumulate(1)},
        args={"steps": 2},
        bad=[({"target": "grad"}, ValueError, "target= must be 'update', got 'grad'")],
        loose={"1": lambda: Accumulate(1)},
        memory="free",
        graphs=4,
        per_entry=True,
        aims=False,
        loops=1,
        keeps=("sum",),
    ),
    Row(
        Freeze,
        good={"biases": lambda: Freeze(is_bias), "nothing": lambda: Freeze(never)},
        args={"where": lambda name, p: False},
        loose={"nothing": lambda: Freeze(never)},
        per_entry=True,
    ),
    Row(
        Identity,
        good={"plain": Identity},
        loose={"plain": Identity},
        per_entry=True,
    ),
    Row(
        Lambda,
        good={"tanh": lambda: Lambda(torch.tanh)},
        args={"fn": torch.tanh},
        loose={"clone": lambda: Lambda(torch.clone)},
        nonfinite="entry",
        complex="free",
        per_entry=True,
        loops=1,
    ),
    Row(
        Noise,
        good={"0.1": lambda: Noise(0.1), "other": lambda: Noise(0.1, 1.0, 3)},
        args={"eta": 0.1},
        memory="free",
        adds=True,
        exact=False,
        draws=True,
        traces=False,
        complex="free",
        loops=2,  # memory for the numbers, and drawing them
    ),
    Row(
        Guard,
        good={"zero": lambda: Guard("zero")},
        loose={"zero": lambda: Guard("zero"), "skip": Guard},
        nonfinite="hidden",
        per_entry=True,
        loops=6,
    ),
    Row(
        Guard,
        good={"skip": Guard},
        memory="guarded",
        scope={"skip": "global"},
        nonfinite="hidden",
        reads_host=True,  # where no fused optimizer comes after it: see modules/test_guard_reads.py
    ),
    Row(
        Guard,
        good={"assert": lambda: Guard("assert")},
        scope={"assert": "global"},
        nonfinite="stops",
    ),
    Row(
        Guard,
        good={"raise": lambda: Guard("raise")},
        scope={"raise": "global"},
        nonfinite="raises",
        reads_host=True,
        traces=False,
        loops=2,
    ),
    Row(
        SkipLarge,
        good={"huge": lambda: SkipLarge(1e30), "some": lambda: SkipLarge(6.0)},
        args={"max_norm": 1.0},
        loose={"inf": lambda: SkipLarge(inf)},
        memory="guarded",
        scope={"huge": "global", "some": "global"},
        nonfinite="hidden",
        reads_host=True,  # where no fused optimizer comes after it: see modules/test_guard_reads.py
    ),
    Row(
        SkipSpike,
        good={"new": SkipSpike, "soon": lambda: SkipSpike(window=4, least=2, sigmas=1.0)},
        bad=[
            ({"least": 1}, ValueError, "least must be an integer of at least 2 and at most 128"),
            ({"least": 129}, ValueError, "least must be an integer of at least 2 and at most 128"),
        ],
        loose={"inf": lambda: SkipSpike(sigmas=inf)},
        memory="guarded",
        scope={"new": "global", "soon": "global"},
        nonfinite="hidden",
        reads_host=True,  # where no fused optimizer comes after it: see modules/test_guard_reads.py
    ),
]
