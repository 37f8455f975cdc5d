"""Limits that past norms set."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.modules.rows.row import BAD_SLICES, NO_SLICES, Row, number, scopes
from torchzero_clip import (
    AGC,
    ACClip,
    AdaClip,
    AdaGC,
    AdaGN,
    AdaptiveClip,
    AutoClip,
    ClipNorm,
    ClipNormGrowth,
    Clippy,
    ClipValue,
    EMAQuantile,
    EMARatio,
    GeometricQuantile,
    Normalize,
    P2Quantile,
    Quantile,
    SpikeClip,
    TrustRatio,
    ZClip,
    ZScoreClip,
    ZStat,
)

inf, nan = math.inf, math.nan


def half(z: Tensor, t: Any) -> Any:
    return t / 2


ROWS = [
    Row(
        AGC,
        good={
            "unit": lambda: AGC(0.1),
            "without vectors": lambda: AGC(0.1, exclude_1d=True),
            **scopes(lambda dim=None, **kw: AGC(0.1, dim=dim), inverse=False),
        },
        bad=[
            ({"dim": "row"}, ValueError, "dim must be"),
            ({"clipping": inf, "eps": 0.0}, ValueError, "eps must be above 0 if clipping is inf"),
        ],
        loose={"1e9": lambda: AGC(1e9, 1.0), "inf": lambda: AGC(inf)},
        nonfinite="scaled",
        complex="turns",
        scope={"tensor": "slices"},
    ),
    Row(
        TrustRatio,
        good={
            **scopes(lambda **kw: TrustRatio(0.1, **kw)),
            "bounds": lambda: TrustRatio(bounds=(0.3, 1.0)),
        },
        bad=[
            *BAD_SLICES,
            *[
                (
                    {"bounds": bounds},
                    ValueError,
                    "bounds= must be a pair (low, high) with low finite and at most high, got",
                )
                for bounds in [(2.0, 1.0), (inf, inf)]
            ],
        ],
        loose={"1": lambda: TrustRatio(bounds=(1.0, 1.0))},
        nonfinite="scaled",
        complex="turns",
    ),
    Row(
        Clippy,
        good={
            "default": Clippy,
            "far": lambda: Clippy(0.5, 0.1),
            "none from zero": lambda: Clippy(absolute=0.0),
        },
        loose={"1e9": lambda: Clippy(1e9, 1e9)},
        nonfinite="scaled",
        complex="turns",
        loops=2,
    ),
    Row(
        AdaGC,
        good={
            **scopes(lambda **kw: AdaGC(warmup_steps=0, **kw), slices=False),
            "warming": lambda: AdaGC(beta=0.5, warmup_steps=3),
        },
        bad=[*NO_SLICES],
        loose={"1e9": lambda: AdaGC(1e9, 1e9)},
        memory="guarded",
        complex="turns",
        scope={"warming": "mixed"},
    ),
    Row(
        AdaGN,
        good=scopes(lambda dim=None: AdaGN((0.5, 0.8), dim=dim), slices=False),
        bad=[*NO_SLICES],
        memory="guarded",
        complex="turns",
        amplifies=1e8,  # by 1 / eps at most
    ),
    Row(
        ACClip,
        good={"default": ACClip, "short": lambda: ACClip((0.5, 0.8), 1e-3)},
        memory="guarded",
        complex="refuses",
        per_entry=True,
        adds=True,
        loops=6,
        keeps=("exp_avg", "exp_avg_abs"),
    ),
    Row(
        AdaClip,
        good={
            "default": AdaClip,
            "past": lambda: AdaClip(0.5),
            "official": lambda: AdaClip(0.5, past_only=False),
        },
        memory="guarded",
        complex="turns",
        amplifies=1e3,  # by 1 / (1 - theta)
        loops=2,
    ),
    Row(
        AdaptiveClip,
        good={
            **scopes(lambda dim=None: AdaptiveClip(ZStat(), dim, None, 2), slices=False),
            "ratio": lambda: AdaptiveClip(EMARatio(clipping="reciprocal"), warmup_steps=1),
            "quantile": lambda: AdaptiveClip(Quantile(0.9, 4), warmup_steps=0),
            "p2": lambda: AdaptiveClip(P2Quantile(0.9), None, None, 0),
            "geometric": lambda: AdaptiveClip(GeometricQuantile(0.5, 0.5), warmup_steps=1),
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
            (
                {"warmup_steps": 1},
                ValueError,
                "warmup_steps must be an integer of at least 2, got 1",
            ),
            ({"warmup": ClipNormGrowth()}, ValueError, "warmup must be None or a transform"),
            ({"warmup": Normalize()}, ValueError, "warmup must be None or a transform that"),
            (
                {"warmup": ClipNorm(1.0, dim="layer")},
                ValueError,
                "with dim='global' or dim='global'",
            ),
            ({"warmup": ClipNorm(1.0, 1, "global")}, ValueError, "that clips the 2-norm"),
            ({"criterion": ZStat}, TypeError, "criterion must be a Criterion, got <class"),
            ({"warmup": ClipValue(1.0)}, ValueError, "warmup must be None or a transform"),
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
            *number("warmup_steps", -1, words="an integer of at least 0"),
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
            (
                {"warmup_steps": 1},
                ValueError,
                "warmup_steps must be an integer of at least 2, got 1",
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
        bad=[*number("warmup_steps", -1, words="an integer of at least 0"), *NO_SLICES],
        loose={"1e9": lambda: ZScoreClip(1e9)},
        memory="guarded",
        complex="turns",
    ),
    Row(
        SpikeClip,
        good={"low": lambda: SpikeClip(2.0, 0.5), "default": SpikeClip},
        loose={"1e9": lambda: SpikeClip(1e9)},
        memory="guarded",
        complex="refuses",
        per_entry=True,
        amplifies=100.0,
        loops=8,
        keeps=("rms",),
    ),
    Row(
        SpikeClip,
        good={
            "wait": lambda: SpikeClip(2.0, 0.5, wait=2),
            "wait again": lambda: SpikeClip(2.0, 0.5, wait=2, every=3),
        },
        loose={"waiting": lambda: SpikeClip(1e-9, wait=9)},
        memory="free",  # a step with a NaN counts
        complex="refuses",
        per_entry=True,
        amplifies=100.0,
        loops=8,
        keeps=("rms",),
    ),
]
