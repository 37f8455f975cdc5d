"""Target and identity: what a rule writes to, and where it writes nothing, over the whole table."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers import at_once, flow, gradients, parameters, same, set_grads
from tests.modules.contract.common import DTYPES, SICK, growing, inf, with_bad
from tests.table import LOOSE, Case, every, over, sampled
from torchzero_clip import ClipNorm, Modular


@sampled()
def test_an_update_rule_never_writes_the_gradient_or_the_parameter(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    kept = copy.deepcopy(steps)
    before = {name: p.detach().clone() for name, p in params.items()}
    probed = flow(case.make(), params, steps)
    assert len(probed) == 3
    for step, old in zip(steps, kept, strict=True):
        same(step, old)
    same(params, before)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), pytest.param(DTYPES, marks=pytest.mark.slow)],
    ids=["two", "all"],
)
@sampled(lambda case: case.aims and type(case.make()) is case.cls)
def test_a_gradient_rule_writes_into_the_gradient_what_would_have_flowed(case, dtypes):
    for dtype in dtypes:
        check_written(case, dtype)


def check_written(case: Case, dtype: torch.dtype) -> None:
    steps = growing(case, 3, dtype=dtype)
    params = parameters(case.shapes, dtype)  # kernels, which a gradient rule has none of, round
    expected = flow(case.make(), params, copy.deepcopy(steps), fused=False)
    params = parameters(case.shapes, dtype)
    opt = Modular(params.items(), case.make().with_values({"target": "grad"}))
    for step, wanted in zip(steps, expected, strict=True):
        before = {name: p.detach().clone() for name, p in params.items()}
        set_grads(params, step)
        memory = {name: g.data_ptr() for name, g in step.items()}
        opt.step()
        grads = {name: p.grad for name, p in params.items()}
        assert {name: g.data_ptr() for name, g in grads.items()} == memory
        kept = {name: u.to(dtype) for name, u in wanted.items()}
        same({name: grads[name] for name in wanted}, kept)
        same(params, {n: p - grads[n] if n in wanted else p for n, p in before.items()})
        for name, p in params.items():
            p.data.copy_(before[name])


@over(LOOSE)
@at_once("dtype", DTYPES)
def test_where_there_is_nothing_to_do_the_update_is_bit_identical(case, dtype):
    steps = growing(case, 3, dtype=dtype)
    params = parameters(case.shapes, dtype)
    for out, step in zip(flow(case.make(), params, steps), steps, strict=True):
        for name, u in out.items():
            assert u.to(dtype).equal(step[name]), name
            assert u.signbit().equal(step[name].signbit()), name


@every(lambda case: case.cls is ClipNorm)
def test_a_limit_of_inf_never_clips_not_even_an_infinite_norm(case):
    grads = with_bad(gradients(case.shapes), SICK, -inf)
    tfm = case.make().with_values({"max_norm": inf})
    (out,) = flow(tfm, parameters(case.shapes), [grads])
    same(out, grads)
