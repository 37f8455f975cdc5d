"""The numbers of rules from papers, worked out by hand, and their edges."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import about, close
from torchzero_clip import LR, Adam, Clipper, Modular, StableAdam, WeightDecay

inf, nan = math.inf, math.nan


def outputs(rule: Any, *gradients: Any, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What a chain makes of each gradient of one parameter at zero."""
    grads = [torch.as_tensor(g, dtype=dtype) for g in gradients]
    p = Parameter(torch.zeros_like(grads[0]))
    links, out = rule if isinstance(rule, tuple) else (rule,), []
    clipper = Clipper([p], *links)
    for g in grads:
        p.grad = g.clone()
        clipper.step()
        out.append(p.grad)
    return out


def values(rule: Any, *gradients: float, dtype: torch.dtype = torch.float64) -> list[float]:
    """What a chain makes of a parameter of one number, step by step."""
    return [out.item() for out in outputs(rule, *[[g] for g in gradients], dtype=dtype)]


# ---------------------------------------------------------------------- StableAdam


def test_stable_adam_divides_by_the_growth_of_the_gradient_over_its_average() -> None:
    first, second = outputs(StableAdam(), [1.0, 1.0], [3.0, 4.0])
    assert first.tolist() == about([1 / (1 + 1e-6)] * 2)
    assert second.tolist() == about([0.676587, 0.651841], abs=1e-6)


def test_stable_adam_shows_its_r_among_the_metrics() -> None:
    p = Parameter(torch.zeros(2, dtype=torch.float64))
    clipper = Clipper([p], StableAdam())
    for gradient in ([1.0, 1.0], [3.0, 4.0]):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        clipper.step()
    assert clipper.metrics()["StableAdam/norm"].item() == about(1.354038)


def test_stable_adam_shortens_a_step_after_a_jump_far_more_than_clipping_adams_update() -> None:
    assert values(StableAdam(eps=1e-12), *[1.0] * 100, 10.0)[-1] == about(0.190002, abs=1e-6)


def test_stable_adam_is_adam_where_gradients_shrink() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(3).sign() / t for t in range(1, 20)]
    for ours, adams in zip(
        outputs(StableAdam((0.9, 0.99), 1e-8), *grads),
        outputs(Adam((0.9, 0.99), 1e-8), *grads),
        strict=True,
    ):
        close(ours, adams, rtol=1e-12)


def test_the_decay_of_stable_adam_is_shortened_with_the_step_and_weight_decay_is_not() -> None:
    p, q = (Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(2))
    ours = Modular([p], StableAdam(weight_decay=0.1), LR(1.0))
    other = Modular([q], StableAdam(), WeightDecay(0.1), LR(1.0))
    for g in (1.0, 1.0, 10.0):
        before, p.grad = p.item(), torch.full_like(p, g)
        q.data.fill_(before)
        q.grad = p.grad.clone()
        ours.step()
        other.step()
    r = ours.metrics()["StableAdam/norm"].item()
    assert r > 1.5
    assert q.item() - p.item() == about(0.1 * before * (1 / r - 1))


def test_a_growth_in_one_tensor_shortens_that_tensor_alone() -> None:
    p, q = (Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    clipper = Clipper([p, q], StableAdam())
    for g in (1.0, 1.0, 50.0):
        p.grad, q.grad = torch.full_like(p, g), torch.ones_like(q)
        clipper.step()
    assert clipper.metrics()["StableAdam/clipped"].tolist() == [True, False]
