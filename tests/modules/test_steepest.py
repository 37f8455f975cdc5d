"""Steepest by hand; that it makes PolarGrad of Muon is held by its authors' code."""

import math

import torch
from torch.nn import Parameter

from tests.core.test_authors import both_engines, drawn
from tests.helpers import at_once, close, stacks
from torchzero_clip import (
    LR,
    Modular,
    Normalize,
    Orthogonalize,
    Scale,
    Sign,
    Steepest,
)


def out(rule, *grads, **options):
    """What a rule makes of gradients, a parameter for each, in one step."""
    params = [Parameter(torch.zeros_like(grad)) for grad in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    Modular(params, rule, LR(1.0), **options).step()
    return [-p.detach() for p in params]


@both_engines
def test_along_its_own_direction_the_update_is_itself(compile):
    grads = [drawn((4, 3), 0), drawn((5,), 1), 1e6 * drawn((2, 2, 2), 2)]
    for dim in (None, "global"):
        for made, grad in zip(
            out(Steepest(Normalize(dim=dim), dim=dim), *grads, compile=compile), grads, strict=True
        ):
            close(made, grad, rtol=1e-5, atol=0)


@both_engines
def test_signs_are_as_long_as_the_sum_of_absolute_values(compile):
    grads = [torch.tensor([3.0, -4.0, 0.0]), torch.tensor([[-2.0]])]
    first, second = out(Steepest(Sign()), *grads, compile=compile)
    close(first, torch.tensor([7.0, -7.0, 0.0]))
    close(second, torch.tensor([[-2.0]]))
    first, second = out(Steepest(Sign(), dim="global"), *grads, compile=compile)
    close(first, torch.tensor([9.0, -9.0, 0.0]))
    close(second, torch.tensor([[-9.0]]))


def test_an_orthogonal_matrix_is_as_long_as_the_singular_values_together():
    stack = drawn((3, 4, 6), 0) * torch.tensor([1.0, 10.0, 1e-6]).view(3, 1, 1)
    u, s, v = torch.linalg.svd(stack, full_matrices=False)
    inner = Orthogonalize(12, "polar_express", layout=stacks)
    for rule in (Steepest(inner), Steepest(inner, dim=(-2, -1))):
        (made,) = out(rule, stack)
        close(made, u @ v * s.sum(1).view(3, 1, 1), rtol=1e-3, atol=1e-10)


def test_a_direction_uphill_is_turned_around():
    (made,) = out(Steepest(Scale(-2.0)), torch.tensor([1.0, 2.0]))
    close(made, torch.tensor([20.0, 40.0]))  # ⟨u, -2 u⟩ = -10


@at_once("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_shown(bad):
    sick, well = out(Steepest(Sign()), torch.tensor([bad, 1.0]), torch.tensor([2.0]))
    assert sick.isnan().all()
    close(well, torch.tensor([2.0]))
