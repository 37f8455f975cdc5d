"""Range and precision: extreme values, every dtype, and that of state, over the whole table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import close, flow, parameters, set_grads
from tests.modules.contract.common import DTYPES, growing
from tests.table import Case, every, sampled
from torchzero_clip import Modular

EXACT = ("step", "started", "lr_max", "weight_sum", "d", "d_max", "numerator")
"""Numbers whose dtype is not the parameters': counts, as in torch.optim, and sums of a run."""


SCALES = [1e20, 1e-20, 1e-41], pytest.param([1e-30], marks=pytest.mark.slow)


@pytest.mark.parametrize("scales", SCALES, ids=str)
@every(lambda case: case.exact and not case.squares)
def test_extreme_values_come_out_as_in_double_precision(case, scales):
    for scale in scales:
        if scale == 1e20 and case.memory != "none" and getattr(case.make(), "ord", 2) == "var":
            continue  # a variance of 1e40 does not fit the float32 that state is kept in
        check_scale(case, scale)


def check_scale(case: Case, scale: float) -> None:
    single = growing(case, 4, scale=scale)
    double = [{name: g.double() for name, g in step.items()} for step in single]
    small = parameters(case.shapes)
    for p in small.values():
        p.data.mul_(scale)
    exact = {name: Parameter(p.detach().double()) for name, p in small.items()}
    out, expected = flow(case.make(), small, single), flow(case.make(), exact, double)
    for a, b in zip(out, expected, strict=True):
        spacing = 4 * 1.4e-45 * case.row.amplifies  # of denormals
        if case.nonfinite == "shown":  # a difference from the mean inherits it
            spacing *= max(1.0, *[u.abs().max().item() / scale for u in b.values()])
        for name in a:
            assert a[name].isfinite().all(), name
            size = b[name].abs().max().item()
            away = (a[name].double() - b[name]).abs().max().item()
            assert away <= 3e-6 * size + spacing, (name, away, size)


@every(lambda case: case.exact)
def test_half_precision_gradients_near_the_end_of_their_range_do_not_overflow(case):
    shapes = {"layer.weight": (2, 2), "layer.bias": (2, 2)}
    half = {name: torch.full(shape, 60000.0).half() for name, shape in shapes.items()}
    half["layer.bias"][0] = -30000.0
    double = {name: g.double() for name, g in half.items()}
    low = {name: Parameter(torch.ones(2, 2).half()) for name in half}
    high = {name: Parameter(torch.ones(2, 2).double()) for name in half}
    (out,), (expected,) = flow(case.make(), low, [half]), flow(case.make(), high, [double])
    assert all(u.isfinite().all() for u in out.values())
    close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtypes", [DTYPES[1:], pytest.param(DTYPES[:1], marks=pytest.mark.slow)])
@sampled()
def test_state_is_single_precision_for_half_parameters_and_double_for_double(case, dtypes):
    for dtype in dtypes:
        state_has_its_precision(case, dtype)


def state_has_its_precision(case: Case, dtype: torch.dtype) -> None:
    params = parameters(case.shapes, dtype)
    opt = Modular(params.items(), case.make())
    for step in growing(case, 2, dtype=dtype):
        set_grads(params, step)
        opt.step()
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    held = [item for memory in opt.state.values() for item in memory.items()]
    held += [item for group in opt.param_groups for item in group["chain"].items()]
    for key, value in held:
        counts = key.rpartition("/")[2] in EXACT
        if isinstance(value, Tensor) and value.is_floating_point() and not counts:
            assert value.dtype == wanted, (key, dtype)
    assert all(p.dtype == dtype for p in params.values())


@pytest.mark.parametrize("dtypes", [DTYPES[1:-1], pytest.param(DTYPES[:1], marks=pytest.mark.slow)])
@every(lambda case: case.exact)
def test_every_dtype_gives_what_double_precision_gives_for_the_same_values(case, dtypes):
    for dtype in dtypes:
        check_dtype(case, dtype)


def check_dtype(case: Case, dtype: torch.dtype) -> None:
    low = growing(case, 3, dtype=dtype)
    high = [{name: g.double() for name, g in step.items()} for step in low]
    params = parameters(case.shapes, dtype)
    exact = {name: Parameter(p.detach().double()) for name, p in params.items()}
    out, expected = flow(case.make(), params, low), flow(case.make(), exact, high)
    eps = torch.finfo(dtype).eps  # a stateless link may work in the parameter's own precision
    for a, b in zip(out, expected, strict=True):
        largest = max([1.0, *(float(t.abs().max()) for t in b.values())])
        close(a, b, rtol=max(4 * eps, 1e-14), atol=max(4 * eps, 1e-14) * largest)
