"""Norms that are equal up to rounding: where a comparison decides a jump, rounding does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
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
CLIPPED: dict[str, Any] = {"warmup": None, "warmup_steps": 5, "observe": "clipped"}
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
    "AutoClip": lambda: AutoClip(warmup_steps=5),
    "AutoClip ema": lambda: AutoClip("percentile", 50.0, history="ema", warmup_steps=5),
    "ZScoreClip": lambda: ZScoreClip(warmup_steps=5),
    "ZClip": lambda: ZClip(max_norm=None, warmup_steps=5),
    "ZClip skip": lambda: ZClip(max_norm=None, warmup_steps=5, skip_on_spike=True),
}


def outputs(rule: Transform, sizes: list[float], **ways: Any) -> list[float]:
    """The norm that is left of each."""
    p = Parameter(torch.zeros(1, dtype=torch.float64))
    opt, out = Modular([p], rule, **ways), []
    for size in sizes:
        p.grad = torch.full_like(p, size)
        before = p.item()
        opt.step()
        out.append(before - p.item())
    return out


def rounded(size: float, generator: random.Random) -> float:
    """A number within two units in the last place of float32."""
    return size * (1 + generator.uniform(-2, 2) * 2.0**-23)


STRETCHES = {
    "constant, then more": [LEVEL] * 30 + [100.0, 4.0, 5.0, LEVEL] * 3,
    "constant, then less": [LEVEL] * 30 + [0.5, 1.0, LEVEL, 9.0] * 3,
    "two levels": [LEVEL, LEVEL, 6.0] * 12,
}


@pytest.mark.parametrize("stretch", STRETCHES)
@pytest.mark.parametrize("name", RULES)
def test_rounding_of_norms_moves_what_is_left_by_rounding_alone(name: str, stretch: str) -> None:
    sizes = STRETCHES[stretch]
    wanted = outputs(RULES[name](), sizes)
    for seed in range(4):
        generator = random.Random(seed)
        got = outputs(RULES[name](), [rounded(size, generator) for size in sizes])
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=2e-5, atol=2e-5)


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
    assert outputs(rule, sizes)[-1] < 1.0


def test_a_step_is_not_skipped_for_the_rounding_of_a_large_norm() -> None:
    generator = random.Random(0)
    sizes = [rounded(1e4, generator) for _ in range(60)]
    left = outputs(RULES["ZClip skip"](), sizes)
    torch.testing.assert_close(torch.tensor(left), torch.tensor(sizes), rtol=1e-6, atol=0)
