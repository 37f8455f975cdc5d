"""Units, groups and order: what is treated together, over the whole table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import Named, close, flow, gradients, parameters, same
from tests.modules.contract.common import SICK, growing
from tests.table import every, other_values, sampled


@sampled(lambda case: not case.draws)
def test_the_order_of_the_parameters_changes_nothing(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    backwards = dict(reversed(params.items()))
    expected = flow(case.make(), params, steps)
    for a, b in zip(flow(case.make(), backwards, steps), expected, strict=True):
        close({name: a[name] for name in b}, b)


@sampled(lambda case: not case.draws, one_in=3)
def test_the_order_of_the_groups_changes_nothing_when_they_agree(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    halves = split(params)
    out = flow(case.make(), params, steps, [{"params": half} for half in halves])
    other = flow(case.make(), params, steps, [{"params": half} for half in halves[::-1]])
    for a, b in zip(out, other, strict=True):
        close(a, b)


def split(params: Named) -> list[list[tuple[str, Parameter]]]:
    """The named parameters in two groups, each with parts of every layer."""
    pairs = list(params.items())
    return [pairs[::2], pairs[1::2]]


@sampled(lambda case: case.scope not in ("global", "layer", "mixed") and not case.draws, one_in=2)
def test_two_groups_are_two_optimizers(case):
    tfm, steps, params = case.make(), growing(case, 3), parameters(case.shapes)
    values = other_values(tfm) if type(tfm) is case.cls else {}
    first, second = split(params)
    together = flow(
        tfm, params, steps, [{"params": first}, {"params": second, **qualified(tfm, values)}]
    )
    changed = tfm.with_values(values)
    alone = [flow(tfm, dict(first), steps), flow(changed, dict(second), steps)]
    for out, a, b in zip(together, *alone, strict=True):
        same(out, {name: {**a, **b}[name] for name in out})


def qualified(tfm: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The live values under the names that are always accepted."""
    return {f"{type(tfm).__name__}/{name}": value for name, value in values.items()}


@every(lambda case: case.scope in ("global", "layer") and case.memory == "none")
def test_groups_that_share_a_unit_share_its_norm_and_keep_their_own_limits(case):
    tfm, grads, params = case.make(), gradients(case.shapes), parameters(case.shapes)
    values = other_values(tfm)
    first, second = split(params)
    groups = [{"params": first}, {"params": second, **qualified(tfm, values)}]
    (out,) = flow(tfm, params, [grads], groups)
    (by_first,) = flow(tfm, params, [grads])
    (by_second,) = flow(tfm.with_values(values), params, [grads])
    close(out, {n: (by_first if n in dict(first) else by_second)[n] for n in out})


@every(lambda case: case.scope in ("global", "layer", "group"))
def test_what_shares_a_unit_does_not_depend_on_how_it_is_cut_into_tensors(case):
    whole = {"layer.weight": (6, 2)}
    parts = {"layer.a": (4, 2), "layer.b": (2, 2)}
    steps = [gradients(whole, i, scale=i + 1) for i in range(4)]
    cut = [dict(zip(parts, step["layer.weight"].split([4, 2]), strict=True)) for step in steps]
    params = parameters(whole)
    pieces = params["layer.weight"].detach().split([4, 2])
    pieces = {name: Parameter(piece) for name, piece in zip(parts, pieces, strict=True)}
    out = flow(case.make(), pieces, cut)
    for a, b in zip(out, flow(case.make(), params, steps), strict=True):
        close({"layer.weight": torch.cat(list(a.values()))} if a else {}, b)


@every(lambda case: case.scope in ("global", "layer", "group"))
def test_a_unit_may_span_dtypes(case):
    steps = growing(case, 3)
    params = parameters(case.shapes)
    expected = flow(case.make(), params, steps)
    for name in list(case.shapes)[::2]:
        params[name] = Parameter(params[name].detach().double())
        for step in steps:
            step[name] = step[name].double()
    for a, b in zip(flow(case.make(), params, steps), expected, strict=True):
        close(a, b)


@every(lambda case: case.scope == "entry")
def test_a_rule_for_entries_does_not_see_how_they_are_cut_into_tensors(case):
    shapes = {"a": (4, 3)}
    params = parameters(shapes)
    steps = [gradients(shapes, i, scale=i + 1) for i in range(3)]
    rows = {str(i): Parameter(row) for i, row in enumerate(params["a"].detach().unbind())}
    cut = [{str(i): row for i, row in enumerate(step["a"].unbind())} for step in steps]
    out = flow(case.make(), rows, cut, fused=False)  # kernels round the end of a row differently
    for a, b in zip(out, flow(case.make(), params, steps, fused=False), strict=True):
        same({"a": torch.stack(list(a.values()))} if a else {}, b)


@every(lambda c: c.scope not in ("slices", "entry") and not c.matrices and not c.draws)
def test_the_order_of_the_entries_of_a_tensor_changes_nothing(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(1))

    def shuffled(t: Tensor) -> Tensor:
        return t.detach().view(-1)[shuffle].view(t.shape)

    mixed = [{**step, SICK: shuffled(step[SICK])} for step in steps]
    other = {**params, SICK: Parameter(shuffled(params[SICK]))}
    out = flow(case.make(), other, mixed)
    for a, b in zip(out, flow(case.make(), params, steps), strict=True):
        close(a, {name: shuffled(u) if name == SICK else u for name, u in b.items()})
