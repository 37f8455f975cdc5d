"""One row for every transform: how to make it, what it refuses, and what it promises.

Every contract in `test_contract.py`, `test_compile.py`, `test_resume.py` and `test_arguments.py`
runs over this table, so that a new module is tested by adding a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import torchzero_clip as tz
from torchzero_clip import (
    AGC,
    EMA,
    LR,
    Accumulate,
    AdaGC,
    Adagrad,
    Adam,
    AdaptiveClip,
    AutoClip,
    Cautious,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    EMAQuantile,
    EMARatio,
    Freeze,
    Guard,
    Identity,
    Lambda,
    Lion,
    Masked,
    Modular,
    Momentum,
    NanToNum,
    Noise,
    Normalize,
    NormalizeByEMA,
    Orthogonalize,
    P2Quantile,
    Partition,
    Quantile,
    RMSprop,
    Scale,
    Sign,
    SkipLarge,
    SoftClip,
    SpikeClip,
    Standardize,
    Transform,
    TrustRatio,
    Warmup,
    WeightDecay,
    When,
    ZClip,
    ZScoreClip,
    ZStat,
)

inf, nan = math.inf, math.nan
Makers = Mapping[str, Callable[[], Transform]]
Bad = tuple[dict[str, Any], type[Exception], str]


@dataclass(frozen=True)
class Row:
    """One class: constructions, refusals, and which contracts hold how."""

    cls: type[Transform]
    good: Makers
    """Label -> a construction. Cover the arguments that change what the rule does."""
    bad: Sequence[Bad] = ()
    """(arguments that differ from `args`, the error, a piece of its sentence)"""
    args: dict[str, Any] = field(default_factory=dict)
    """The arguments that the class cannot do without."""
    loose: Makers = field(default_factory=dict)
    """Constructions with nothing to do for small gradients, however often they come."""

    memory: Literal["none", "guarded", "free"] = "none"
    """guarded: a step with a NaN or an infinity is as if it had not been; free: as in torch."""
    nonfinite: Literal["scaled", "shown", "entry", "hidden", "raises", "free"] = "free"
    """Stateless rules: an infinite norm makes finite entries 0 and infinite ones NaN (scaled), the
    unit shows that something was wrong (shown), each entry is for itself (entry)."""
    complex: Literal["turns", "pairs", "refuses", "free"] = "pairs"
    """turns: a rotation of all entries rotates the result; pairs: as pairs of real numbers."""
    scope: Mapping[str, str] = field(default_factory=dict)
    """Label -> "mixed" where units of several sizes have a say, or what `dim` does not tell."""
    per_entry: bool = False
    """Every entry is treated by itself."""
    squares: bool = False
    """Squares in the parameter's own precision limit the range, as in torch.optim."""
    adds: bool = False
    """A zero gradient need not give a zero update."""
    matrices: bool = False
    """Takes tensors of two or more dimensions only."""
    exact: bool = True
    """float64 gives more than float32 does."""
    draws: bool = False
    """Draws random numbers, one after another."""
    aims: bool = True
    """Takes target="grad"."""
    reads_host: bool = False
    """Waits for the device: an exception that SPEC §6 lists."""
    traces: bool = True
    """torch.compile makes one graph of it; the exceptions are in SPEC §6."""
    graphs: int = 1
    """Compilations at most; more than one where the number of the step decides what happens."""
    loops: int = 0
    """Operators a tensor and step, where torch has no foreach operator that would do."""
    amplifies: float = 1
    """What a limit multiplies the kept numbers by, their rounding among denormals included."""
    measures: int = 1
    """How many lists of tensors the rule takes the norms of."""


def scopes(
    make: Callable[..., Transform], slices: bool = True, inverse: bool = True
) -> dict[str, Any]:
    """A construction for every scope; `make` takes `dim` and `inverse_dims`."""
    asked: dict[str, dict[str, Any]] = {
        "tensor": {},
        "layer": {"dim": "layer"},
        "group": {"dim": "group"},
        "global": {"dim": "global"},
    }
    if slices:
        asked["rows"] = {"dim": -1}
        asked["columns"] = {"dim": 0}
        asked["two dims"] = {"dim": (0, -1)}
    if slices and inverse:
        asked["all but the first"] = {"dim": 0, "inverse_dims": True}
    return {label: lambda kw=kw: make(**kw) for label, kw in asked.items()}


def orders(make: Callable[[Any], Transform]) -> dict[str, Any]:
    """A construction for every kind of norm."""
    kinds = [0.5, 1, 3, 10, inf, 0, "l4", "mad", "std", "var", "sum"]
    return {f"ord {order}": lambda order=order: make(order) for order in kinds}


def number(name: str, *values: Any, error: type[Exception] = ValueError, words: str) -> list[Bad]:
    """Refusals of single values of one argument, each of which the sentence must repeat."""
    return [({name: value}, error, f"{name} must be {words}, got {value!r}") for value in values]


def at_least(name: str, bound: float, optional: bool = False) -> list[Bad]:
    """What every argument that must be a number from `bound` on refuses."""
    words = f"a number at least {bound:g}" + (" or None" if optional else "")
    wrong = ["1", True, (1.0, 2.0)] + ([] if optional else [None])
    return [
        *number(name, bound - 0.5, -inf, nan, words=words),
        *number(name, torch.tensor(bound - 0.5), words=words),
        *number(name, *wrong, error=TypeError, words=words),
    ]


def steps(name: str, bound: int) -> list[Bad]:
    """What every number of steps refuses."""
    words = f"an integer at least {bound}"
    return [
        *number(name, bound - 1, -7, words=words),
        *number(name, bound + 1.0, "3", None, True, error=TypeError, words=words),
    ]


def share(name: str) -> list[Bad]:
    """What every β refuses: it must be in [0, 1)."""
    words = "a number at least 0 and below 1"
    return [
        *number(name, 1.0, 1, 1.5, -0.1, nan, inf, words=words),
        *number(name, "0.9", None, True, (0.5, 0.5), error=TypeError, words=words),
    ]


def shares(name: str) -> list[Bad]:
    """What a pair of β refuses."""
    words = "2 numbers, each at least 0 and below 1"
    return [
        *number(name, (0.9, 1.0), (-0.1, 0.9), (nan, 0.9), words=words),
        *number(name, ("0.9", 0.9), (None, 0.9), error=TypeError, words=words),
        ({name: (0.9,)}, ValueError, name),
        ({name: (0.9, 0.9, 0.9)}, ValueError, name),
        ({name: 0.9}, TypeError, name),
    ]


EVERYWHERE: list[Bad] = [
    (
        {"target": "gradient"},
        ValueError,
        "target must be one of ['update', 'grad'], got 'gradient'",
    ),
    ({"target": None}, ValueError, "target must be one of ['update', 'grad'], got None"),
    ({"name": "a/b"}, ValueError, "name must be a string without '/', got 'a/b'"),
    ({"name": 3}, ValueError, "name must be a string without '/', got 3"),
]
DIM = "dim must be None, an int, a sequence of ints, 'layer', 'group' or 'global'"
BAD_DIM: list[Bad] = [
    ({"dim": "tensor"}, ValueError, f"{DIM}, got 'tensor'"),
    ({"dim": 0.5}, TypeError, "dim must be an int or a sequence of ints, got 0.5"),
    ({"dim": True}, TypeError, "dim must be an int or a sequence of ints, got True"),
    ({"dim": (0, "a")}, TypeError, "dim must be an int or a sequence of ints, got (0, 'a')"),
]
BAD_SLICES: list[Bad] = [
    *BAD_DIM,
    ({"inverse_dims": True}, ValueError, "inverse_dims=True needs dim to be ints, got dim=None"),
    ({"dim": "global", "inverse_dims": True}, ValueError, "needs dim to be ints, got dim='global'"),
    *number("min_size", -1, words="an integer at least 0"),
    *number("min_size", 1.5, None, error=TypeError, words="an integer at least 0"),
]
BAD_ORD: list[Bad] = [
    ({"ord": order}, ValueError, f"ord must be a number > 0, inf, 0, or one of ['l0', 'l1', {rest}")
    for order, rest in (
        ("l5", "'l2', 'l3', 'l4', 'linf', 'mad', 'rms', 'std', 'var', 'sum'], got 'l5'"),
        (-1, "'l2'"),
        (nan, "'l2'"),
        (None, "'l2'"),
        (True, "'l2'"),
    )
]
NO_SLICES: list[Bad] = [
    *BAD_DIM,
    ({"dim": 0}, ValueError, "dim must be None, 'layer', 'group' or 'global' for a rule with"),
    ({"dim": (0, 1)}, ValueError, "dim must be None, 'layer', 'group' or 'global' for a rule with"),
]
GROWTH: list[Bad] = [
    *at_least("add", 0, optional=True),
    *at_least("mul", 1, optional=True),
    *at_least("min_value", 0, optional=True),
    *at_least("max_decay", 1, optional=True),
    ({"add": None, "mul": None}, ValueError, "give add or mul, got None for both"),
]
BY_EMA: list[Bad] = [
    *share("beta"),
    *at_least("eps", 0),
    *at_least("max_ema_growth", 1, optional=True),
    *BAD_ORD,
    *NO_SLICES,
    ({"ema_init": "ones"}, ValueError, "ema_init must be one of ['zeros', 'update'], got 'ones'"),
    ({"tensorwise": False, "dim": "layer"}, ValueError, "tensorwise=False means dim='global'"),
]


INNER: list[Bad] = [
    ({"tfm": "Scale"}, TypeError, "tfm must be a Transform, got 'Scale'"),
    ({"tfm": Scale}, TypeError, "tfm must be a Transform, got"),
    ({"target": "grad"}, ValueError, "target belongs to the transforms inside, got 'grad'"),
    ({"where": "weight"}, TypeError, "where must be a function, got 'weight'"),
]


# Functions that constructions take: of this module, so that they can be pickled.


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


def half(z: Tensor, t: Any) -> Any:
    return t / 2


ROWS = [
    # ------------------------------------------------------------------ clipping, stateless
    Row(
        ClipValue,
        good={"0.5": lambda: ClipValue(0.5), "zero": lambda: ClipValue(0)},
        args={"value": 1.0},
        bad=at_least("value", 0),
        loose={"1e9": lambda: ClipValue(1e9), "inf": lambda: ClipValue(inf)},
        nonfinite="entry",
        complex="refuses",
        per_entry=True,
    ),
    Row(
        ClipNorm,
        good={
            **scopes(lambda **kw: ClipNorm(0.5, **kw)),
            **orders(lambda order: ClipNorm(0.1, order)),
            "zero": lambda: ClipNorm(0),
            "std of all": lambda: ClipNorm(0.1, "std", "global"),
            "inf of columns": lambda: ClipNorm(0.1, inf, 0),
            "var of rows": lambda: ClipNorm(0.1, "var", -1),
            "min_size": lambda: ClipNorm(0.5, min_size=4),
        },
        args={"max_norm": 1.0},
        bad=[*at_least("max_norm", 0), *BAD_ORD, *BAD_SLICES],
        loose={
            **scopes(lambda **kw: ClipNorm(1e9, **kw)),
            **orders(lambda order: ClipNorm(1e9, order)),
            "inf": lambda: ClipNorm(inf),
            "inf for all": lambda: ClipNorm(inf, dim="global"),
        },
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        Normalize,
        good={
            **scopes(lambda **kw: Normalize(2.0, **kw)),
            **orders(lambda order: Normalize(2.0, order)),
            "zero": lambda: Normalize(0),
            "default": Normalize,
        },
        bad=[*at_least("norm_value", 0), *BAD_ORD, *BAD_SLICES],
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        Standardize,
        good=scopes(Standardize),
        bad=[*at_least("eps", 0), *BAD_SLICES],
        nonfinite="shown",
        complex="turns",
        loops=2,
    ),
    Row(
        Centralize,
        good=scopes(Centralize),
        bad=BAD_SLICES,
        nonfinite="shown",
        complex="turns",
        loops=1,
    ),
    Row(
        ClipPercentile,
        good={
            "60": lambda: ClipPercentile(60),
            "0": lambda: ClipPercentile(0),
            "60 of all": lambda: ClipPercentile(60, "global"),
        },
        args={"percentile": 50.0},
        bad=[
            *number("percentile", -1, 100.5, nan, words="a number at least 0 and at most 100"),
            *number(
                "percentile", "50", error=TypeError, words="a number at least 0 and at most 100"
            ),
            ({"dim": "layer"}, ValueError, "dim must be one of [None, 'global'], got 'layer'"),
            ({"dim": 0}, ValueError, "dim must be one of [None, 'global'], got 0"),
        ],
        loose={"100": lambda: ClipPercentile(100), "of all": lambda: ClipPercentile(100, "global")},
        nonfinite="entry",
        complex="refuses",
        loops=3,
    ),
    Row(
        ClipRMS,
        good=scopes(lambda **kw: ClipRMS(0.5, **kw)),
        bad=[*at_least("max_rms", 0), *BAD_SLICES],
        loose=scopes(lambda **kw: ClipRMS(1e9, **kw)),
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        SoftClip,
        good={
            **scopes(lambda **kw: SoftClip(0.5, **kw)),
            **orders(lambda order: SoftClip(0.5, order)),
            "zero": lambda: SoftClip(0),
        },
        args={"max_norm": 1.0},
        bad=[*at_least("max_norm", 0), *BAD_ORD, *BAD_SLICES],
        loose={"inf": lambda: SoftClip(inf)},
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        Sign,
        good={"plain": Sign},
        nonfinite="entry",
        complex="refuses",
        per_entry=True,
        loops=3,
    ),
    Row(
        NanToNum,
        good={"zeros": NanToNum, "others": lambda: NanToNum(1.0, 2.0, -3.0)},
        bad=[
            bad
            for name in ("nan", "posinf", "neginf")
            for bad in (
                *number(name, nan, words="a number"),
                *number(name, "0", None, error=TypeError, words="a number"),
            )
        ],
        loose={"zeros": NanToNum},
        nonfinite="hidden",
        per_entry=True,
        loops=6,
    ),
    # ------------------------------------------------------------------ clipping, with memory
    Row(
        ClipNormGrowth,
        good={
            **scopes(lambda **kw: ClipNormGrowth(mul=1.1, **kw), slices=False),
            "parameterwise": lambda: ClipNormGrowth(mul=1.1, parameterwise=False),
            "add": lambda: ClipNormGrowth(0.1, None),
            "both": lambda: ClipNormGrowth(0.1, 1.1, None, None),
            "ord inf": lambda: ClipNormGrowth(mul=1.1, ord=inf),
            "ord std": lambda: ClipNormGrowth(mul=1.1, ord="std", dim="global"),
            "ord var": lambda: ClipNormGrowth(mul=1.1, ord="var"),
        },
        bad=[
            *GROWTH,
            *BAD_ORD,
            *NO_SLICES,
            (
                {"parameterwise": False, "dim": "layer"},
                ValueError,
                "parameterwise=False means dim='global'; give one of the two, got dim='layer'",
            ),
        ],
        loose={"1e9": lambda: ClipNormGrowth(mul=1e9), "add": lambda: ClipNormGrowth(1e9, None)},
        memory="guarded",
        complex="turns",
    ),
    Row(
        ClipValueGrowth,
        good={
            "mul": lambda: ClipValueGrowth(mul=1.1),
            "add": lambda: ClipValueGrowth(0.1, None),
            "both": lambda: ClipValueGrowth(0.1, 1.1, None, None),
        },
        bad=GROWTH,
        loose={"add": lambda: ClipValueGrowth(1e9, None)},
        memory="guarded",
        complex="refuses",
        per_entry=True,
        loops=9,
    ),
    Row(
        ClipNormByEMA,
        good={
            **scopes(lambda **kw: ClipNormByEMA(0.5, **kw), slices=False),
            "tensorwise": lambda: ClipNormByEMA(0.5, tensorwise=False),
            "from the update": lambda: ClipNormByEMA(0.5, ema_init="update"),
            "free growth": lambda: ClipNormByEMA(0.5, max_ema_growth=None),
            "ord inf": lambda: ClipNormByEMA(0.5, inf),
            "ord std": lambda: ClipNormByEMA(0.5, "std", dim="global"),
            "ord var": lambda: ClipNormByEMA(0.5, "var"),
        },
        bad=BY_EMA,
        memory="guarded",
        complex="turns",
        loops=1,
        measures=2,
    ),
    Row(
        NormalizeByEMA,
        good={
            **scopes(lambda **kw: NormalizeByEMA(0.5, **kw), slices=False),
            "tensorwise": lambda: NormalizeByEMA(0.5, tensorwise=False),
            "from the update": lambda: NormalizeByEMA(0.5, ema_init="update"),
            "free growth": lambda: NormalizeByEMA(0.5, max_ema_growth=None),
        },
        bad=BY_EMA,
        memory="guarded",
        complex="turns",
        loops=1,
        measures=2,
    ),
    Row(
        ClipValueByEMA,
        good={
            "zeros": lambda: ClipValueByEMA(0.5),
            "from the update": lambda: ClipValueByEMA(0.5, "update"),
            "doubled": lambda: ClipValueByEMA(0.5, ema_tfm=Scale(2.0)),
            "chain": lambda: ClipValueByEMA(0.5, ema_tfm=Chain(EMA(0.5), Scale(-0.5))),
        },
        bad=[
            *share("beta"),
            ({"ema_init": None}, ValueError, "ema_init must be one of ['zeros', 'update']"),
            ({"ema_tfm": "Scale"}, TypeError, "ema_tfm must be a Transform or None, got 'Scale'"),
            ({"ema_tfm": Scale}, TypeError, "ema_tfm must be a Transform or None, got"),
            (
                {"ema_tfm": Chain(Scale(2.0, target="grad"))},
                ValueError,
                'may not have target="grad", got',
            ),
        ],
        memory="guarded",
        complex="refuses",
        per_entry=True,
        loops=14,
    ),
    # ------------------------------------------------------------------ descent
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
            *share("momentum"),
            *number("dampening", 1.5, nan, words="a number at most 1"),
            *number("dampening", "0", error=TypeError, words="a number at most 1"),
        ],
        loose={"none": lambda: Momentum(0.0)},
        memory="free",
        per_entry=True,
    ),
    Row(
        RMSprop,
        good={
            "default": RMSprop,
            "centered": lambda: RMSprop(0.9, 1e-3, centered=True),
            "momentum": lambda: RMSprop(0.9, 1e-3, 0.5),
            "both": lambda: RMSprop(0.9, 1e-3, 0.5, True),
        },
        bad=[*share("alpha"), *at_least("eps", 0), *share("momentum")],
        memory="free",
        per_entry=True,
        squares=True,
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
    ),
    Row(
        Lion,
        good={"default": Lion, "short": lambda: Lion((0.5, 0.6))},
        bad=shares("betas"),
        memory="free",
        per_entry=True,
    ),
    Row(
        EMA,
        good={"default": EMA, "debias": lambda: EMA(0.5, debias=True)},
        bad=share("beta"),
        loose={"none": lambda: EMA(0.0)},
        memory="free",
        per_entry=True,
    ),
    Row(
        WeightDecay,
        good={"0.1": lambda: WeightDecay(0.1)},
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
        Orthogonalize,
        good={
            "default": Orthogonalize,
            "original": lambda: Orthogonalize(3, scale="original"),
            "rms": lambda: Orthogonalize(scale="match_rms_adamw"),
            "muon": lambda: Chain(Momentum(0.95, nesterov=True), Orthogonalize()),
        },
        bad=[
            *number("steps", 0, words="an integer at least 1"),
            *number("steps", 2.5, error=TypeError, words="an integer at least 1"),
            *number("eps", 0.0, -1.0, nan, words="a number above 0"),
            *number("coefficients", (nan, 0.0, 0.0), words="3 numbers"),
            ({"coefficients": (1.0, 2.0)}, ValueError, "coefficients"),
            ({"scale": "muon"}, ValueError, "scale must be one of [None, 'original', 'match_rms"),
        ],
        complex="refuses",
        matrices=True,
        exact=False,
        loops=30,
    ),
    # ------------------------------------------------------------------ adaptive
    Row(
        AGC,
        good={
            "unit": lambda: AGC(0.1),
            "vectors too": lambda: AGC(0.1, exclude_1d=False),
            **scopes(lambda dim=None, **kw: AGC(0.1, dim=dim), inverse=False),
        },
        bad=[
            *at_least("clipping", 0),
            *at_least("eps", 0),
            ({"dim": "row"}, ValueError, "dim must be"),
        ],
        loose={"1e9": lambda: AGC(1e9, 1.0)},
        nonfinite="scaled",
        complex="turns",
        scope={"tensor": "slices"},
    ),
    Row(
        TrustRatio,
        good=scopes(lambda **kw: TrustRatio(0.1, **kw)),
        bad=[*at_least("coefficient", 0), *BAD_SLICES],
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        AdaGC,
        good={
            **scopes(lambda **kw: AdaGC(warmup_steps=0, **kw), slices=False),
            "warming": lambda: AdaGC(beta=0.5, warmup_steps=3),
        },
        bad=[
            *at_least("rel", 0),
            *at_least("abs", 0),
            *share("beta"),
            *steps("warmup_steps", 0),
            *NO_SLICES,
        ],
        loose={"1e9": lambda: AdaGC(1e9, 1e9)},
        memory="guarded",
        complex="turns",
        scope={"warming": "mixed"},
    ),
    Row(
        AdaptiveClip,
        good={
            **scopes(lambda dim=None: AdaptiveClip(ZStat(), dim, None, 2), slices=False),
            "ratio": lambda: AdaptiveClip(EMARatio(clipping="reciprocal"), warmup_steps=1),
            "quantile": lambda: AdaptiveClip(Quantile(0.9, 4), warmup_steps=0),
            "p2": lambda: AdaptiveClip(P2Quantile(0.9), None, None, 0),
            "ema": lambda: AdaptiveClip(EMAQuantile(0.9), warmup_steps=0, observe="clipped"),
            "warming": lambda: AdaptiveClip(ZStat(clipping="max"), None, warmup_steps=3),
            "warming alone": lambda: AdaptiveClip(ZStat(), None, ClipNorm(0.1), 2),
            "own": lambda: AdaptiveClip(ZStat(clipping=half), "layer", ClipNorm(2, dim="layer"), 2),
        },
        args={"criterion": ZStat()},
        bad=[
            *NO_SLICES,
            ({"criterion": "ZStat"}, TypeError, "criterion must be a Criterion, got 'ZStat'"),
            ({"criterion": ClipNorm(1)}, TypeError, "criterion must be a Criterion, got ClipNorm"),
            ({"observe": "both"}, ValueError, "observe must be 'clipped', 'raw' or None, got 'bot"),
            ({"warmup_steps": 1}, ValueError, "warmup_steps must be an integer at least 2, got 1"),
            ({"warmup_steps": 2.0}, TypeError, "warmup_steps must be an integer at least 2"),
            ({"warmup": ClipNormGrowth()}, ValueError, "warmup must be None or a rule without"),
            ({"warmup": Normalize()}, ValueError, "warmup must be None or a rule without memory"),
            (
                {"warmup": ClipNorm(1.0, dim="layer")},
                ValueError,
                "with dim='global' or dim='global'",
            ),
            ({"warmup": ClipNorm(1.0, 1, "global")}, ValueError, "that clips the 2-norm"),
            ({"criterion": ZStat}, TypeError, "criterion must be a Criterion, got <class"),
            ({"warmup": ClipValue(1.0)}, ValueError, "warmup must be None or a rule without mem"),
        ],
        loose={"ratio": lambda: AdaptiveClip(EMARatio(r_thresh=1e9), warmup=None, warmup_steps=1)},
        memory="guarded",
        complex="turns",
        scope={"warming": "mixed"},
    ),
    Row(
        AutoClip,
        good={
            **scopes(lambda dim=None: AutoClip(warmup_steps=2, dim=dim), slices=False),
            "percentile": lambda: AutoClip("percentile", 50, window_size=4, warmup_steps=1),
            "ema": lambda: AutoClip("percentile", 50, "ema", ema_decay=0.5, warmup_steps=1),
        },
        bad=[
            ({"mode": "median"}, ValueError, "mode must be one of ['auto', 'percentile'], got 'me"),
            ({"history": "all"}, ValueError, "history must be one of ['window', 'ema'], got 'all'"),
            *number("percentile", -1, 101, nan, words="a number at least 0 and at most 100"),
            *steps("window_size", 1),
            *steps("warmup_steps", 0),
            *share("ema_decay"),
            *NO_SLICES,
        ],
        loose={"still warming": lambda: AutoClip(warmup_steps=1000)},
        memory="guarded",
        complex="turns",
    ),
    Row(
        ZClip,
        good={
            **scopes(lambda dim=None: ZClip(warmup_steps=2, max_norm=None, dim=dim), slices=False),
            "mean": lambda: ZClip(0.9, 1.5, None, 2, "mean"),
            "percentile": lambda: ZClip(0.9, 1.5, 5.0, 2, "percentile"),
            "skip": lambda: ZClip(0.9, 1.5, 5.0, 2, skip_on_spike=True),
        },
        bad=[
            *share("alpha"),
            *number("z_thresh", 0.0, -1, nan, words="a number above 0"),
            *at_least("max_norm", 0, optional=True),
            ({"warmup_steps": 1}, ValueError, "warmup_steps must be an integer at least 2, got 1"),
            (
                {"mode": "auto"},
                ValueError,
                "mode must be one of ['adaptive', 'mean', 'percentile']",
            ),
            *NO_SLICES,
        ],
        loose={"1e9": lambda: ZClip(z_thresh=1e9, max_norm=None, warmup_steps=2)},
        memory="guarded",
        complex="turns",
    ),
    Row(
        ZScoreClip,
        good=scopes(lambda dim=None: ZScoreClip(1.0, 0.9, 1, dim), slices=False),
        bad=[*at_least("zmax", 0), *share("ema_decay"), *steps("warmup_steps", 0), *NO_SLICES],
        loose={"1e9": lambda: ZScoreClip(1e9)},
        memory="guarded",
        complex="turns",
    ),
    Row(
        SpikeClip,
        good={"low": lambda: SpikeClip(2.0, 0.5), "default": SpikeClip},
        bad=[*number("threshold", 0, -1.0, nan, words="a number above 0"), *share("beta")],
        loose={"1e9": lambda: SpikeClip(1e9)},
        memory="guarded",
        complex="refuses",
        per_entry=True,
        amplifies=100.0,
        loops=8,
    ),
    # ------------------------------------------------------------------ flow
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
        },
        args={"transforms": {"other": Scale(2.0)}, "labels": lambda name, p: "other"},
        bad=[
            (
                {"transforms": [Scale(2.0)]},
                TypeError,
                "transforms must be a dict of label and Tran",
            ),
            ({"transforms": {"a": "Scale"}}, TypeError, "transforms must be a dict of label and T"),
            ({"labels": "weight"}, TypeError, "labels must be a function, got 'weight'"),
            ({"target": "grad"}, ValueError, "target belongs to the transforms inside, got 'grad'"),
        ],
        loose={"both": lambda: Partition({"weight": ClipNorm(1e9), "other": Scale(1.0)}, kind)},
        aims=False,
    ),
    Row(
        When,
        good={
            "odd": lambda: When(odd, ClipNorm(0.5)),
            "average": lambda: When(odd, EMA(0.5)),
        },
        args={"condition": lambda step: True, "tfm": Scale(2.0)},
        bad=[*INNER[:3], ({"condition": 5}, TypeError, "condition must be a function, got 5")],
        loose={"never": lambda: When(never, Scale(2.0))},
        memory="free",
        graphs=4,
        aims=False,
    ),
    Row(
        Accumulate,
        good={"2": lambda: Accumulate(2), "1": lambda: Accumulate(1)},
        args={"steps": 2},
        bad=[
            *steps("steps", 1),
            ({"target": "grad"}, ValueError, "target must be 'update', got 'grad'"),
        ],
        loose={"1": lambda: Accumulate(1)},
        memory="free",
        graphs=4,
        per_entry=True,
        aims=False,
        loops=1,
    ),
    Row(
        Freeze,
        good={"biases": lambda: Freeze(is_bias), "nothing": lambda: Freeze(never)},
        args={"where": lambda name, p: False},
        bad=[({"where": "bias"}, TypeError, "where must be a function, got 'bias'")],
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
        bad=[({"fn": 2.0}, TypeError, "fn must be a function, got 2.0")],
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
        bad=[
            *at_least("eta", 0),
            *number("gamma", nan, words="a number"),
            *number("seed", 1.5, None, error=TypeError, words="an integer"),
        ],
        memory="free",
        adds=True,
        exact=False,
        draws=True,
        traces=False,
        complex="free",
        loops=1,
    ),
    Row(
        Guard,
        good={"zero": lambda: Guard("zero")},
        bad=[
            ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite must be one of ['skip', 'zero', "),
            ({"max_consecutive": 0}, ValueError, "max_consecutive must be an integer at least 1"),
            ({"max_consecutive": 1.5}, TypeError, "max_consecutive must be an integer at least 1"),
        ],
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
        reads_host=True,
        traces=False,
        loops=2,
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
        bad=[
            *at_least("max_norm", 0),
            ({"max_consecutive": 0}, ValueError, "max_consecutive must be an integer at least 1"),
        ],
        loose={"inf": lambda: SkipLarge(inf)},
        memory="guarded",
        scope={"huge": "global", "some": "global"},
        nonfinite="hidden",
        reads_host=True,
        traces=False,
    ),
]

# ---------------------------------------------------------------------- the cases of the contracts


@dataclass(frozen=True)
class Case:
    """One construction of one row."""

    row: Row
    label: str
    make: Callable[[], Transform]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    def __str__(self) -> str:
        return f"{self.row.cls.__name__}-{self.label}"

    @property
    def scope(self) -> str:
        """What is treated together: an entry, a tensor, slices, a layer, a group, or all."""
        if self.label in self.row.scope:
            return self.row.scope[self.label]
        tfm = self.make()
        scope = getattr(tfm, "scope", getattr(tfm, "dim", None))
        if self.row.per_entry:
            return "entry"
        if scope is None:
            return "tensor"
        return scope if isinstance(scope, str) else "slices"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The named parameters of a small model that the rule takes."""
        return {
            name: shape for name, shape in SHAPES.items() if len(shape) > 1 or not self.row.matrices
        }


SHAPES = {
    "embed.weight": (4, 3),
    "embed.bias": (4,),
    "conv.weight": (2, 3, 2, 2),
    "head.weight": (3, 4),
    "head.scale": (),
    "head.one": (1,),
}

GOOD = [Case(row, label, make) for row in ROWS for label, make in row.good.items()]
LOOSE = [Case(row, label, make) for row in ROWS for label, make in row.loose.items()]


def over(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Run a test for each of these cases."""
    return pytest.mark.parametrize("case", cases, ids=str)


def every(where: Callable[[Case], Any] = lambda case: True) -> pytest.MarkDecorator:
    """Run a test for every good construction of the table, or of the rows where it applies."""
    return over([case for case in GOOD if where(case)])


# ---------------------------------------------------------------------- small models


class Probe(Transform):
    """Ends the step and keeps what flowed so far, so that a test sees it and no parameter moves."""

    seen: dict[int, Tensor] = field(default_factory=dict)

    def step(self, buckets: list[Any]) -> list[Any]:
        for bucket in buckets:
            for p, u in zip(bucket.params.tensors, bucket.update.tensors, strict=True):
                self.seen[id(p)] = u.clone()
        return []


Named = dict[str, Parameter]
Tensors = dict[str, Tensor]


def parameters(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> Named:
    """Named parameters, the same at every call."""
    return {name: Parameter(t) for name, t in gradients(shapes, seed=99, dtype=dtype).items()}


def gradients(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensors:
    """Named gradients; one name, seed and shape always gives the same values."""
    out = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        out[name] = (torch.randn(shape, generator=generator, dtype=drawn) * scale).to(dtype)
    return out


def set_grads(params: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> None:
    """Give every parameter its gradient."""
    for name, p in params.items():
        p.grad = grads.get(name)


def flow(
    tfm: Transform,
    params: Named,
    steps: Sequence[Mapping[str, Tensor | None]],
    groups: Sequence[dict[str, Any]] | None = None,
    fused: bool = True,
) -> list[Tensors]:
    """What comes out of the transform at each step, by the names of the parameters."""
    probe = Probe()
    opt = Modular(groups or list(params.items()), tfm, probe, fused=fused)
    out = []
    for grads in steps:
        probe.seen.clear()
        set_grads(params, grads)
        opt.step()
        out.append({n: probe.seen[id(p)] for n, p in params.items() if id(p) in probe.seen})
    return out


def other_values(tfm: Transform) -> dict[str, Any]:
    """Live values of the transform that differ from its own and that it takes."""
    values: dict[str, Any] = {}
    for name in tfm.live:
        value = getattr(tfm, name)
        for factor in (0.8, 1.3):
            try:
                tfm.with_values({name: _times(value, factor)})
            except ValueError:
                continue
            values[name] = _times(value, factor)
            break
    return values


def _times(value: Any, factor: float) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_times(v, factor) for v in value)
    return value + 1 if isinstance(value, int) and not isinstance(value, bool) else value * factor


def close(a: Tensors, b: Tensors, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    """Assert that two sets of named tensors agree; NaN equals NaN."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name],
            b[name],
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            check_dtype=False,
            check_stride=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def same(a: Tensors, b: Tensors) -> None:
    """Assert that two sets of named tensors agree to the last bit."""
    close(a, b, rtol=0, atol=0)


def concrete() -> set[str]:
    """The public transforms that can be constructed."""
    abstract = {"Transform", "NormRule", "AdaptiveRule", "TensorwiseTransform"}
    public = {name for name in tz.__all__ if isinstance(getattr(tz, name), type)}
    return {n for n in public if issubclass(getattr(tz, n), Transform)} - abstract


def required(cls: type[Transform]) -> set[str]:
    """The names of the arguments without a default."""
    missing = dataclasses.MISSING
    return {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is missing and f.default_factory is missing
    }


def settings() -> str:
    """The table of docs/settings.md: what holds for each module, each column by a test."""
    columns = [
        "eager",
        "`torch.compile`",
        "`compile=True`",
        "DDP",
        "FSDP2",
        "TP",
        "AMP",
        "DCP",
        "bf16",
    ]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + ":-:|" * len(columns)]
    docs = Path(__file__).parent.parent / "docs" / "modules"
    pages = {p.stem.replace("_", ""): p.relative_to(docs).as_posix() for p in docs.glob("*/*.md")}
    for row in sorted({row.cls: row for row in ROWS}.values(), key=lambda row: row.cls.__name__):
        cells = ["✓"] * len(columns)
        if not row.traces:
            cells[1] = "no"
        elif row.graphs > 1:
            cells[1] = "✓ ¹"
        page = pages.get(row.cls.__name__.lower())
        name = f"[{row.cls.__name__}](modules/{page})" if page else row.cls.__name__
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
