"""Shampoo: the numbers of its formula, which behind Graft are known but for their size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers import stacks
from torchzero_clip import LR, Modular, Shampoo

BETA1, BETA2, EPS = 0.9, 0.99, 1e-3


def root(matrix: Tensor) -> Tensor:
    """(matrix + ε)^(-1/4)"""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag((values.clamp(min=0) + EPS) ** -0.25) @ vectors.mT


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["a matrix", "a stack"])
def test_averages_without_their_weight_pass_through_the_roots_of_the_first_step(
    shape: tuple[int, ...],
) -> None:
    """Roots are renewed in a later step than these."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    rule = Shampoo((BETA1, BETA2), EPS, every=100, exponent=0.25, layout=stacks)
    opt = Modular([p], rule, LR(1.0))
    grads = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
    first = grads[0].view(-1, 3, 4)
    left = torch.stack([root(g @ g.mT) for g in first])
    right = torch.stack([root(g.mT @ g) for g in first])
    average = torch.zeros_like(p)
    for step, grad in enumerate(grads, 1):
        before, p.grad = p.detach().clone(), grad
        opt.step()
        average = BETA1 * average + (1 - BETA1) * grad
        wanted = left @ (average / (1 - BETA1**step)).view(-1, 3, 4) @ right
        torch.testing.assert_close(before - p.detach(), wanted.view(shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_first_gradient_with_nan_neither_raises_nor_changes_other_matrices(bad: float) -> None:
    def weights(poisoned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
        opt = Modular(params, Shampoo(every=2), LR(0.1))
        for step in range(3):
            for p in params:
                p.grad = torch.randn(4, 4)
            if poisoned and step == 0:
                params[0].grad[0, 0] = bad
            opt.step()
            assert opt.metrics()["Shampoo/kept"] == (poisoned and step == 0)
        return [p.detach() for p in params]

    assert torch.equal(weights(poisoned=True)[1], weights(poisoned=False)[1])
