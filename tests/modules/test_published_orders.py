"""Where ClipRMS and TrustRatio stand in the methods that use them, in numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import torchzero_clip
from tests.identities.identity import load
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Chain,
    ClipRMS,
    Modular,
    Momentum,
    RMSprop,
    TrustRatio,
    WeightDecay,
)


def moved(gradients: list[float], *links: Any) -> float:
    """How far a number is moved in the last step."""
    p = Parameter(torch.zeros(1, dtype=torch.float64))
    opt = Modular([p], *links)
    before = 0.0
    for g in gradients:
        before = p.item()
        p.grad = torch.full_like(p, g)
        opt.step()
    return before - p.item()


def test_clip_rms_after_adam_is_not_stable_adamw() -> None:
    """StableAdamW measures g/√v, without the momentum, and shortens far more after a jump."""
    gradients, (beta1, beta2) = [1.0] * 100 + [10.0], (0.9, 0.99)
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        mean, square = m / (1 - beta1**t), v / (1 - beta2**t)
    adam = mean / math.sqrt(square)
    stable = adam / max(1.0, gradients[-1] / math.sqrt(square))
    assert stable == pytest.approx(0.190002, abs=1e-6)
    assert moved(gradients, Adam((beta1, beta2))) == pytest.approx(1.189226, abs=1e-6)
    assert moved(gradients, Adam((beta1, beta2)), ClipRMS(1.0)) == pytest.approx(1.0)


def test_lars_scales_before_its_momentum() -> None:
    """Decay, trust ratio, learning rate, then the sum of the momentum."""
    torch.manual_seed(0)
    w = torch.randn(4, 3, dtype=torch.float64)
    p, trace = Parameter(w.clone()), torch.zeros_like(w)
    opt = Modular([p], WeightDecay(0.1), TrustRatio(0.01), LR(0.5), Momentum(0.9))
    for _ in range(20):
        g = torch.randn_like(w)
        p.grad = g.clone()
        opt.step()
        u = g + 0.1 * w
        trace = 0.9 * trace + 0.5 * 0.01 * w.norm() / u.norm() * u
        w = w - trace
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


def far(name: str, ours: Any) -> bool:
    """Whether another chain is not the method of this identity."""
    wrong = dataclasses.replace(load()[name], ours=ours)
    return wrong.distance(torch.float32) > 1000


def test_trust_ratio_after_momentum_is_not_lars() -> None:
    def after(lr: float, momentum: float, weight_decay: float, trust_coefficient: float) -> Any:
        ratio = TrustRatio(trust_coefficient)
        return Chain(WeightDecay(weight_decay), Momentum(momentum), ratio, LR(lr))

    assert far("lars", after)


def test_clip_rms_after_adam_is_not_adafactor() -> None:
    def after(lr: float, momentum: float, clipping_threshold: float) -> Any:
        clip = ClipRMS(clipping_threshold)
        return Chain(RMSprop(0.0, 1e-30), EMA(momentum), clip, LR(lr))

    assert far("adafactor_unfactored", after)


@pytest.mark.parametrize(
    ("name", "false"),
    [("ClipRMS", "Put after Adam it is"), ("TrustRatio", "after Momentum it is LARS")],
)
def test_the_help_of_a_rule_claims_no_method_that_it_is_not(name: str, false: str) -> None:
    assert false not in (getattr(torchzero_clip, name).__doc__ or "")
