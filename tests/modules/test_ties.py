"""Norms that are equal up to rounding: where a comparison decides a jump, rounding does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    AdaptiveClip,
    AutoClip,
    EMAQuantile,
    EMARatio,
    Modular,
    P2Quantile,
    Quantile,
    Transform,
    ZClip,
    ZScoreClip,
    ZStat,
)

LEVEL = 3.0
CLIPPED: dict[str, Any] = {"warmup": None, "warmup_steps": 5, "observe": "clipped", "dim": None}
RAW = {**CLIPPED, "observe": "raw"}
RULES: dict[str, Callable[[], Transform]] = {
    "EMAQuantile clipped": lambda: AdaptiveClip(EMAQuantile(0.5, alpha=0.9), **CLIPPED),
    "EMAQuantile": lambda: AdaptiveClip(EMAQuantile(0.5, alpha=0.9), **RAW),
    "P2Quantile clipped": lambda: AdaptiveClip(P2Quantile(0.5), **CLIPPED),
    "P2Quantile": lambda: AdaptiveClip(P2Quantile(0.5), **RAW),
    "Quantile": lambda: AdaptiveClip(Quantile(0.5, window=8), **RAW),
    "ZStat": lambda: AdaptiveClip(ZStat(clipping="mean"), **RAW),
    "ZStat clipped": lambda: AdaptiveClip(ZStat(clipping="mean"), **CLIPPED),
    "EMARatio": lambda: AdaptiveClip(EMARatio(clipping="mean"), **RAW),
    "AutoClip": lambda: AutoClip(warmup_steps=5, dim=None),
    "AutoClip ema": lambda: AutoClip("percentile", 50.0, history="ema", warmup_steps=5, dim=None),
    "ZScoreClip": lambda: ZScoreClip(warmup_steps=5, dim=None),
    "ZClip": lambda: ZClip(max_norm=None, warmup_steps=5, dim=None),
    "ZClip skip": lambda: ZClip(max_norm=None, warmup_steps=5, dim=None, skip_on_spike=True),
}


def outputs(rule: Transform, *rows: list[float]) -> Tensor:
    """The norm that is left of each; every row has a tensor of its own."""
    params = [Parameter(torch.zeros(1, dtype=torch.float64)) for _ in rows]
    opt, out = Modular(params, rule), []
    for sizes in zip(*rows, strict=True):
        for p, size in zip(params, sizes, strict=True):
            p.grad = torch.full_like(p, size)
        before = torch.cat([p.detach() for p in params])
        opt.step()
        out.append(before - torch.cat([p.detach() for p in params]))
    return torch.stack(out, dim=1)


def rounded(size: float, generator: random.Random) -> float:
    """A number within two units in the last place of float32."""
    return size * (1 + generator.uniform(-2, 2) * 2.0**-23)


STRETCHES = {
    "constant, then more": [LEVEL] * 30 + [100.0, 4.0, 5.0, LEVEL] * 3,
    "constant, then less": [LEVEL] * 30 + [0.5, 1.0, LEVEL, 9.0] * 3,
    "two levels": [LEVEL, LEVEL, 6.0] * 14,
}
COPIES = 4


@pytest.mark.parametrize("name", RULES)
def test_rounding_of_norms_moves_what_is_left_by_rounding_alone(name: str) -> None:
    """All stretches and their rounded copies at once: each is the norms of one tensor."""
    rows = []
    for sizes in STRETCHES.values():
        generator = random.Random(0)
        rows.append(sizes)
        rows += [[rounded(size, generator) for size in sizes] for _ in range(COPIES)]
    left = outputs(RULES[name](), *rows).split(COPIES + 1)
    for stretch, (wanted, *found) in zip(STRETCHES, left, strict=True):
        for got in found:
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5, msg=stretch)


@pytest.mark.parametrize("name", ["EMAQuantile clipped", "AutoClip ema", "AutoClip"])
def test_the_ways_to_run_a_chain_agree_after_constant_norms(name: str) -> None:
    """A gradient in float32, whose norm each way rounds as it likes."""
    moved = []
    for ways in ({}, {"fused": False}):
        p = Parameter(torch.zeros(257))
        opt = Modular([p], RULES[name](), **ways)
        for size in [0.1] * 30 + [0.3, 0.1, 0.05, 0.1] * 3:
            p.grad = torch.full_like(p, size)
            opt.step()
        moved.append(p.detach())
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-6)


def test_a_norm_clearly_below_still_counts_as_below() -> None:
    rule = AdaptiveClip(EMAQuantile(0.5, alpha=0.5), **{**RAW, "warmup_steps": 0})
    sizes = [1.0, 1.0 - 1e-4, 1.0 - 1e-4, 1.0]
    assert outputs(rule, sizes)[0, -1] < 1.0


def test_a_step_is_not_skipped_for_the_rounding_of_a_large_norm() -> None:
    generator = random.Random(0)
    sizes = [rounded(1e4, generator) for _ in range(60)]
    (left,) = outputs(RULES["ZClip skip"](), sizes)
    wanted = torch.tensor(sizes, dtype=torch.float64)
    torch.testing.assert_close(left, wanted, rtol=1e-6, atol=0)
