"""Bounds on values and norms, fixed or from the recent past."""

from __future__ import annotations

import math

from tests.modules.rows.row import (
    BAD_SLICES,
    NO_SLICES,
    Bad,
    Row,
    orders,
    scopes,
)
from torchzero_clip import (
    EMA,
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
    DeltaClip,
    NanToNum,
    Normalize,
    NormalizeByEMA,
    Scale,
    Sign,
    SoftClip,
    Standardize,
)

inf, nan = math.inf, math.nan

GROWTH: list[Bad] = [
    ({"add": None, "mul": None}, ValueError, "pass add= or mul=, got None for both"),
]


BY_EMA: list[Bad] = [
    *NO_SLICES,
    (
        {"tensorwise": False, "dim": "layer"},
        ValueError,
        "tensorwise=False means dim='global' and cannot be",
    ),
]


ROWS = [
    Row(
        ClipValue,
        good={"0.5": lambda: ClipValue(0.5), "zero": lambda: ClipValue(0)},
        args={"value": 1.0},
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
        bad=[*BAD_SLICES],
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
        DeltaClip,
        good={
            **scopes(lambda **kw: DeltaClip(0.5, 0.3, **kw)),
            **orders(lambda order: DeltaClip(0.1, 0.3, order)),
            "default": lambda: DeltaClip(0.5),
        },
        args={"max_norm": 1.0},
        bad=[*BAD_SLICES],
        loose={"1e9": lambda: DeltaClip(1e9), "1": lambda: DeltaClip(1e-9, 1.0)},
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
            "sqrt_min": lambda: Normalize(2.0, per_shape="sqrt_min"),
            "stacks": lambda: Normalize(dim=(-2, -1), per_shape="sqrt_rows"),
        },
        bad=[
            *BAD_SLICES,
            (
                {"per_shape": "sqrt_min", "dim": "global"},
                ValueError,
                "per_shape='sqrt_min' needs norms of matrices, so dim must be None or (-2, -1)",
            ),
        ],
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        Standardize,
        good=scopes(Standardize),
        bad=[*BAD_SLICES],
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
        loose={"100": lambda: ClipPercentile(100), "of all": lambda: ClipPercentile(100, "global")},
        nonfinite="entry",
        complex="refuses",
        loops=3,
    ),
    Row(
        ClipRMS,
        good=scopes(lambda **kw: ClipRMS(0.5, **kw)),
        bad=[*BAD_SLICES],
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
        bad=[*BAD_SLICES],
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
        loose={"zeros": NanToNum},
        nonfinite="hidden",
        per_entry=True,
        loops=6,
    ),
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
            *NO_SLICES,
            (
                {"parameterwise": False, "dim": "layer"},
                ValueError,
                "parameterwise=False means dim='global' and cannot be combined with dim='layer'",
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
        keeps=("previous",),
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
        loops=2,  # where: on CPU it reads a flag and copies a tensor
        measures=2,
        keeps=("ema",),
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
        loops=2,  # where: on CPU it reads a flag and copies a tensor
        measures=2,
        keeps=("ema",),
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
            ({"ema_tfm": "Scale"}, TypeError, "ema_tfm must be a Transform or None, got 'Scale'"),
            ({"ema_tfm": Scale}, TypeError, "ema_tfm must be a Transform or None, got"),
            (
                {"ema_tfm": Chain(Scale(2.0, target="grad"))},
                ValueError,
                "put guards, Freeze, Accumulate, and all transforms",
            ),
        ],
        memory="guarded",
        complex="refuses",
        per_entry=True,
        loops=14,
        keeps=("ema",),
    ),
]
