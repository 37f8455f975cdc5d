"""Rows and ScaleByShape by hand; that they make Dion2 and Dion3 is held by its authors' code."""

import math

import pytest
import torch
from torch.nn import Parameter

from tests.core.test_authors import both_engines, drawn
from tests.helpers import at_once, close, flat, same, stacks
from torchzero_clip import (
    LR,
    Chain,
    ClipSpectral,
    Guard,
    Lambda,
    Modular,
    NeuronNorm,
    Orthogonalize,
    Rows,
    ScaleByShape,
)

AS_IT_IS = Lambda(lambda u: u)


def moves(opt, params, *grads):
    """What a step with these gradients subtracts."""
    for p, grad in zip(params, grads, strict=True):
        p.grad = torch.as_tensor(grad).clone()
    before = [p.detach().clone() for p in params]
    opt.step()
    return [old - p.detach() for old, p in zip(before, params, strict=True)]


def zeros(*shapes):
    return [Parameter(torch.zeros(shape)) for shape in shapes]


@both_engines
def test_the_largest_rows_go_and_the_others_wait(compile):
    params = zeros((4, 2))
    rows = Rows(0.5, AS_IT_IS, error=0.5, lines="rows")
    opt = Modular(params, rows, LR(1.0), compile=compile)
    first = torch.tensor([[1.0, 0.0], [0.0, -3.0], [2.0, 0.5], [0.0, 0.25]])
    (moved,) = moves(opt, params, first)
    same(moved, torch.tensor([[0.0, 0.0], [0.0, -3.0], [2.0, 0.5], [0.0, 0.0]]))
    held = torch.tensor([[1.0, 0.0], [0.0, -1.5], [1.0, 0.25], [0.0, 0.25]])
    same(opt.state[params[0]]["Rows/momentum"], held)
    opt.param_groups[0]["error"] = 0.0
    (moved,) = moves(opt, params, torch.tensor([[1.0, 0.0]] + [[0.0, 0.0]] * 3))
    same(moved, torch.tensor([[2.0, 0.0], [0.0, -1.5], [0.0, 0.0], [0.0, 0.0]]))
    held = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.25], [0.0, 0.25]])
    same(opt.state[params[0]]["Rows/momentum"], held)


@pytest.mark.parametrize(("lines", "dim"), [("shorter", 1), ("rows", 0)])
def test_of_a_tall_matrix_columns_are_taken_unless_rows_are_asked_for(lines, dim):
    params = zeros((5, 3), (3, 5))
    opt = Modular(params, Rows(0.3, AS_IT_IS, lines=lines), LR(1.0))
    tall, wide = moves(opt, params, drawn((5, 3), 0), drawn((3, 5), 1))
    assert (tall.abs().sum(1 - dim) > 0).sum() == math.ceil(0.3 * tall.shape[dim])
    assert (wide.abs().sum(1) > 0).sum() == 1


@at_once("share,rows,count", [(1e-6, 7, 1), (0.25, 8, 2), (0.25, 9, 3), (1.0, 5, 5)])
def test_the_count_is_rounded_up_and_at_least_one(share, rows, count):
    params = zeros((rows, 9))
    (moved,) = moves(
        Modular(params, Rows(share, AS_IT_IS), LR(1.0)), params, drawn((rows, 9), 0).abs()
    )
    assert (moved.abs().sum(1) > 0).sum() == count


def test_all_rows_without_error_are_the_rule_inside():
    shapes = (4, 6), (7, 3), (5, 5)
    params, others = zeros(*shapes), zeros(*shapes)
    opt = Modular(params, Rows(1.0, Orthogonalize(), error=0.0), LR(1.0))
    other = Modular(others, Orthogonalize(), LR(1.0))
    for step in range(3):
        grads = [drawn(shape, 10 * step + i) for i, shape in enumerate(shapes)]
        for one, two in zip(moves(opt, params, *grads), moves(other, others, *grads), strict=True):
            close(one, two, rtol=0, atol=1e-5)  # rows stand in another order


def test_nothing_is_lost():
    params = zeros((6, 4))
    opt = Modular(params, Rows(0.3, AS_IT_IS, error=0.0), LR(1.0))
    grads = [drawn((6, 4), i) for i in range(20)]
    went = sum(moves(opt, params, grad)[0] for grad in grads)
    close(went + opt.state[params[0]]["Rows/momentum"], sum(grads), rtol=0, atol=1e-4)


@at_once("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_shown_and_never_kept(bad):
    shapes = (4, 6), (3, 5)
    params, others = zeros(*shapes), zeros(*shapes)
    opt, other = [Modular(some, Rows(0.5, Orthogonalize()), LR(1.0)) for some in (params, others)]
    for step in range(4):
        grads = [drawn(shape, 10 * step + i) for i, shape in enumerate(shapes)]
        if step == 2:
            sick = grads[0].clone()
            sick[1, 1] = bad
            broken, _ = moves(opt, params, sick, grads[1])
            assert broken.isnan().all()
            assert opt.metrics()["Rows/kept"] == 1
            params[0].data.copy_(others[0].data)
            others[0].grad, others[1].grad = None, grads[1]
            other.step()
            continue
        moves(opt, params, *grads)
        moves(other, others, *grads)
    for one, two in zip(params, others, strict=True):
        same(one.detach(), two.detach())


def test_a_skipped_step_leaves_the_momentum():
    params = zeros((4, 6))
    opt = Modular(params, Guard(), Rows(0.5, Orthogonalize()), LR(1.0))
    moves(opt, params, drawn((4, 6), 0))
    held = opt.state[params[0]]["Rows/momentum"].clone()
    (moved,) = moves(opt, params, torch.full((4, 6), math.nan))
    assert not moved.any()
    same(opt.state[params[0]]["Rows/momentum"], held)


@pytest.mark.parametrize("shape", [(6, 4), (3, 2, 4)], ids=["fused", "stack"])
def test_the_matrices_of_a_layout_have_rows_of_their_own(shape):
    layout = {"w": [2, 2, 2]} if len(shape) == 2 else {"w": "e rows d -> e rows d"}
    whole, parts = zeros(shape), zeros((2, 4), (2, 4), (2, 4))
    rule = Rows(0.5, Orthogonalize(), layout=layout)
    opt = Modular([("w", whole[0])], rule, LR(1.0))
    other = Modular(parts, Rows(0.5, Orthogonalize()), LR(1.0))
    for step in range(4):
        grad = drawn(shape, step)
        (moved,) = moves(opt, whole, grad)
        others = moves(other, parts, *grad.view(3, 2, 4))
        close(moved.view(3, 2, 4), torch.stack(others), rtol=0, atol=1e-6)


def test_a_vector_is_an_error():
    params = zeros((4,))
    with pytest.raises(
        ValueError,
        match=r"Rows accepts only matrices of real numbers, got a parameter of shape \(4,\)",
    ):
        moves(Modular(params, Rows(0.5, Orthogonalize()), LR(1.0)), params, torch.ones(4))


def test_live_values_of_the_rule_inside_are_live():
    params = zeros((4, 6))
    opt = Modular(params, Rows(0.5, ClipSpectral(2.0, name="limit")), LR(1.0))
    for limit in (2.0, 0.5):
        opt.param_groups[0]["max_norm"] = limit
        (moved,) = moves(opt, params, 100 * drawn((4, 6), 0))
        close(torch.linalg.svdvals(moved)[:2], torch.full((2,), limit), rtol=1e-4, atol=0)


def test_neurons_that_wait_keep_their_average():
    params, others = zeros((4, 6)), zeros((4, 6))
    chain = Rows(0.5, Orthogonalize(), lines="rows"), NeuronNorm(0.9)
    opt = Modular(params, *chain, LR(1.0))
    plain = Modular(others, chain[0], LR(1.0))
    squares = torch.zeros(4, 1)
    for step in range(6):
        grad = drawn((4, 6), step)
        (moved,) = moves(opt, params, grad)
        (u,) = moves(plain, others, grad)
        chosen = u.abs().sum(1, keepdim=True) > 0
        mean = u.square().mean(1, keepdim=True)
        squares = torch.where(chosen, 0.9 * squares + 0.1 * mean, squares)
        same((moved.abs().sum(1, keepdim=True) > 0), chosen)
        close(moved.norm(), u.norm(), rtol=1e-4, atol=0)
        close(opt.state[params[0]]["NeuronNorm/rms"], squares.sqrt(), rtol=1e-4, atol=1e-6)


@at_once("by,factors", [("sqrt_ratio", (2.0, 0.5, 0.5)), ("inverse_columns", (0.5, 0.125, 0.25))])
def test_shapes_are_rows_and_columns_of_matrices(by, factors):
    params = zeros((8, 2), (2, 8), (3, 1, 4))
    rule = ScaleByShape(3.0, by, layout=stacks)
    opt = Modular(params, rule, LR(1.0))
    for p, moved, factor in zip(
        params, moves(opt, params, *[torch.ones(p.shape) for p in params]), factors, strict=True
    ):
        close(moved, torch.full(p.shape, 3.0 * factor), rtol=1e-6, atol=0)
    kernel = zeros((3, 1, 4))
    opt = Modular(kernel, Chain(ScaleByShape(3.0, by, layout=flat)), LR(1.0))
    (moved,) = moves(opt, kernel, torch.ones(3, 1, 4))
    close(
        moved, torch.full((3, 1, 4), 3.0 * (0.75**0.5 if by[0] == "s" else 0.25)), rtol=1e-6, atol=0
    )
