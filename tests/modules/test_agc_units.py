"""AGC's units: rows of weights; biases, vectors and single numbers, each as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import AGC, Clipper, spec

SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (4, 3), (2, 3, 2, 2)]


def clipped(p: Tensor, grad: Tensor, rule: AGC) -> Tensor:
    """The gradient that the rule leaves."""
    p = Parameter(p.clone())
    p.grad = grad.clone()
    Clipper([p], rule).step()
    assert p.grad is not None
    return p.grad


def by_the_paper(p: Tensor, grad: Tensor, clipping: float, eps: float) -> Tensor:
    """g · limit / max(‖g‖, 1e-6) where ‖g‖ is larger, row by row; all of a vector is one."""
    g, w = grad.double(), p.double()
    g, w = [t.reshape(1, -1) if t.dim() < 2 else t.flatten(1) for t in (g, w)]
    most = clipping * w.norm(dim=1, keepdim=True).clamp(min=eps)
    norm = g.norm(dim=1, keepdim=True)
    out = torch.where(norm > most, g * (most / norm.clamp(min=1e-6)), g)
    return out.reshape(grad.shape).float()


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_unit_is_clipped_by_default(shape: tuple[int, ...], size: float) -> None:
    p, grad = torch.randn(shape), torch.randn(shape) * size
    torch.testing.assert_close(clipped(p, grad, AGC(0.05, 0.01)), by_the_paper(p, grad, 0.05, 0.01))


@pytest.mark.parametrize(("norm", "left"), [(5e-8, 5e-8), (5e-7, 5e-8), (2e-6, 1e-7)])
def test_a_tiny_gradient_within_its_limit_is_left_alone(norm: float, left: float) -> None:
    """The limit is 1e-7 here, below the 1e-6 that a norm counts for at least where it clips."""
    got = clipped(torch.zeros(2), torch.tensor([norm, 0.0]), AGC(1e-4, 1e-3))
    assert got.tolist() == pytest.approx([left, 0.0], rel=1e-5)
    exact = spec.agc([norm, 0.0], [0.0, 0.0], 1e-4, 1e-3)
    assert exact == pytest.approx([left, 0.0], rel=1e-9)


@pytest.mark.parametrize("dim", ["unit", None])
def test_a_parameter_without_dims_is_one_unit(dim: Any) -> None:
    got = clipped(torch.tensor(-2.0), torch.tensor(3.0), AGC(0.1, dim=dim))
    assert got.item() == pytest.approx(0.2)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_exclude_1d_leaves_less_than_two_dims_alone(shape: tuple[int, ...]) -> None:
    grad = torch.full(shape, 100.0)
    assert clipped(torch.ones(shape), grad, AGC(0.01, exclude_1d=True)).equal(grad)


def test_a_number_a_bias_and_a_weight_go_together() -> None:
    params = [Parameter(torch.ones(shape)) for shape in SHAPES]
    for p in params:
        p.grad = torch.full_like(p, 100.0)
    clipper = Clipper(params, AGC(0.01))
    clipper.step()
    for p in params:
        assert p.grad is not None
        torch.testing.assert_close(p.grad, p.detach() * 0.01)
    assert clipper.metrics()["AGC/norm"].shape == (1 + 1 + 1 + 4 + 2,)
