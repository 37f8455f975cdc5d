"""Shapes and layouts: empty tensors, single numbers, strides, over the whole table."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import Named, close, flow, gradients, parameters, set_grads
from tests.modules.contract.common import growing, owns_lr
from tests.table import every, sampled
from torchzero_clip import LR, Modular


@every(lambda case: not case.matrices)
def test_an_empty_tensor_changes_nothing_for_the_others(case):
    shapes = {**case.shapes, "embed.none": (0,), "none.weight": (3, 0)}
    out = flow(case.make(), parameters(shapes), [gradients(shapes, i) for i in range(3)])
    without = flow(
        case.make(), parameters(case.shapes), [gradients(case.shapes, i) for i in range(3)]
    )
    for a, b in zip(out, without, strict=True):
        assert a.pop("embed.none", torch.empty(0)).shape == (0,)
        assert a.pop("none.weight", torch.empty(3, 0)).shape == (3, 0)
        close(a, b)


@every()
def test_empty_tensors_alone_are_no_trouble(case):
    shapes = {"embed.weight": (0, 2), "head.weight": (3, 0)}
    outs = [out for out in flow(case.make(), parameters(shapes), [gradients(shapes)] * 3) if out]
    assert outs
    for out in outs:
        assert {name: tuple(u.shape) for name, u in out.items()} == shapes


@every(lambda case: not case.matrices)
def test_a_tensor_without_dims_counts_like_one_with_a_single_entry(case):
    some = {"embed.weight": (), "embed.bias": (3,)}
    other = {"embed.weight": (1,), "embed.bias": (3,)}
    steps = [gradients(some, i, scale=i + 1) for i in range(3)]
    out = flow(case.make(), parameters(some), steps)
    rule = case.make()
    if getattr(rule, "scope", None) is not None and not (  # nothing to slice
        isinstance(rule.scope, str) or rule.dims(torch.zeros(()))
    ):
        for a, step in zip(out, steps, strict=True):
            assert a["embed.weight"].equal(step["embed.weight"])
        return
    steps = [{name: g.view(other[name]) for name, g in step.items()} for step in steps]
    params = {n: Parameter(p.detach().view(other[n])) for n, p in parameters(some).items()}
    for a, b in zip(out, flow(case.make(), params, steps), strict=True):
        close({name: u.view(other[name]) for name, u in a.items()}, b)


def permuted(t: Tensor) -> Tensor:
    """The same values in another order in memory: of the transpose, or with the channels last."""
    if t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t.t().contiguous().t() if t.dim() == 2 else t


def strided(t: Tensor) -> Tensor:
    """The same values with gaps between them."""
    if not t.dim():
        return t
    memory = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    memory[..., ::2] = t
    return memory[..., ::2]


LAYOUTS = (permuted, strided)


@sampled()
def test_the_memory_layout_changes_nothing(case):
    """That of gradients, and of both; parameters alone have the test below."""
    steps, params = growing(case, 3), parameters(case.shapes)
    expected = flow(case.make(), params, steps)
    tolerance = {} if case.exact else {"rtol": 2e-2, "atol": 2e-2}
    for layout in LAYOUTS:
        others = [{name: layout(g) for name, g in step.items()} for step in steps]
        moved = {name: Parameter(layout(p.detach())) for name, p in params.items()}
        for given, taken in ((params, others), (moved, others)):
            changed = [t for t in (*taken[0].values(), *given.values()) if not t.is_contiguous()]
            assert changed  # or the test would compare nothing
            for a, b in zip(flow(case.make(), given, taken), expected, strict=True):
                close(a, b, **tolerance)


@sampled()
def test_the_memory_layout_of_parameters_survives_training(case):
    def trained(params: Named) -> Named:
        opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
        for step in growing(case, 3):
            set_grads(params, step)
            opt.step()
        return params

    plain = trained(parameters(case.shapes))
    for layout in LAYOUTS:
        start = parameters(case.shapes)
        params = {name: Parameter(layout(p.detach())) for name, p in start.items()}
        strides = {name: p.stride() for name, p in params.items()}
        trained(params)
        assert {name: p.stride() for name, p in params.items()} == strides
        close(params, plain, **({} if case.exact else {"rtol": 2e-2, "atol": 2e-2}))
