"""Complex numbers: what a rule makes of them, or that it refuses them, over the whole table."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once, close, flow, gradients, parameters
from tests.modules.contract.common import growing
from tests.table import every


@at_once("dtype", [torch.complex64, torch.complex128])
@every(lambda case: case.complex == "refuses")
def test_a_rule_without_a_meaning_for_complex_numbers_says_so(case, dtype):
    params = parameters(case.shapes, dtype)
    with pytest.raises((TypeError, ValueError), match=case.cls.__name__) as info:
        flow(case.make(), params, [gradients(case.shapes, dtype=dtype)])
    assert re.search(rf"complex.*{dtype}|real.*{dtype}", str(info.value))


@every(lambda case: case.complex == "turns")
def test_turning_complex_gradients_by_an_angle_turns_the_result(case):
    turn = complex(math.cos(1.0), math.sin(1.0))
    real = growing(case, 4, dtype=torch.float64)
    turned = [{name: g * turn for name, g in step.items()} for step in real]
    params = parameters(case.shapes, torch.float64)
    expected = flow(case.make(), params, real)
    turned_params = {name: Parameter(p.detach() * turn) for name, p in params.items()}
    out = flow(case.make(), turned_params, turned)
    for a, b in zip(out, expected, strict=True):
        close(a, {name: u * turn for name, u in b.items()}, rtol=1e-12, atol=1e-12)


@every(lambda case: case.nonfinite == "scaled" and case.make().ord not in ("std", "var", "sum"))
def test_a_complex_norm_is_that_of_the_magnitudes(case):
    grads = gradients(case.shapes, dtype=torch.complex64)
    sizes = {name: g.abs() for name, g in grads.items()}
    params = parameters(case.shapes, torch.complex64)
    (out,) = flow(case.make(), params, [grads])
    real = {name: Parameter(p.detach().abs()) for name, p in params.items()}
    (expected,) = flow(case.make(), real, [sizes])
    close({name: u.abs() for name, u in out.items()}, expected, rtol=1e-5)


@every(lambda case: case.complex == "pairs")
def test_complex_numbers_are_treated_as_pairs_of_real_ones(case):
    whole = growing(case, 3, dtype=torch.complex64)
    pairs = [{n: torch.view_as_real(g) for n, g in step.items()} for step in whole]
    params = parameters(case.shapes, torch.complex64)
    halves = {n: Parameter(torch.view_as_real(p.detach())) for n, p in params.items()}
    out, expected = flow(case.make(), params, whole), flow(case.make(), halves, pairs)
    for a, b in zip(out, expected, strict=True):
        close({name: torch.view_as_real(u) for name, u in a.items()}, b)
