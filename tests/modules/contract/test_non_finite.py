"""NaN and infinity: where they stay, and what a memory makes of them, over the whole table."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.helpers import at_once, flow, gradients, parameters, same, set_grads
from tests.modules.contract.common import SICK, growing, inf, nan, with_bad
from tests.table import ROWS, Case, every
from torchzero_clip import LR, Modular, Momentum


def unit_of(case: Case, name: str) -> set[str]:
    """The names of the tensors that share a unit with this one."""
    if case.scope in ("group", "global", "mixed"):
        return set(case.shapes)
    if case.scope == "layer":
        layer = name.rpartition(".")[0]
        return {other for other in case.shapes if other.rpartition(".")[0] == layer}
    return {name}


def remembers_inside(case: Case) -> bool:
    """Whether a transform inside has a memory of its own, which no mask reaches."""
    memory = {row.cls: row.memory for row in ROWS}
    return any(memory.get(type(tfm), "none") != "none" for tfm in list(case.make().walk())[1:])


BAD_VALUES = (nan, inf, -inf)

BAD = at_once("bad", BAD_VALUES)


@every(lambda case: case.nonfinite not in ("raises", "stops"))
def test_a_non_finite_entry_stays_inside_its_unit(case):
    healthy = growing(case, 2)
    expected = flow(case.make(), parameters(case.shapes), healthy)[1]
    for bad in BAD_VALUES:
        sick = [healthy[0], with_bad(healthy[1], SICK, bad)]
        out = flow(case.make(), parameters(case.shapes), sick)[1]
        for name in out.keys() - unit_of(case, SICK):
            assert out[name].equal(expected[name]), (name, bad)
        if case.scope == "entry" and SICK in out:
            assert out[SICK].view(-1)[1:].equal(expected[SICK].view(-1)[1:]), bad


@BAD
@every(lambda case: case.nonfinite == "scaled")
def test_a_norm_that_is_nan_gives_nan_and_an_infinite_one_zeros_and_nan(case, bad):
    grads = with_bad(gradients(case.shapes), SICK, bad)
    (out,) = flow(case.make(), parameters(case.shapes), [grads])
    tfm = case.make()
    for name in unit_of(case, SICK):
        touched = unit_mask(case, grads[name])
        if not touched.any() or grads[name].numel() < getattr(tfm, "min_size", 1):
            continue
        if tfm.ord in (0, "l0"):  # a count is finite whatever it counts
            assert out[name].isfinite().equal(grads[name].isfinite())
        elif math.isnan(bad) or tfm.ord in ("std", "var"):
            assert out[name][touched].isnan().all(), name
        else:
            finite = grads[name].isfinite()
            assert not out[name][touched & finite].any(), name
            assert out[name][~finite].isnan().all(), name


def unit_mask(case: Case, grad: Tensor) -> Tensor:
    """The entries of a tensor that share the slice of its first entry."""
    if case.scope != "slices":
        return torch.ones_like(grad, dtype=torch.bool)
    mask = torch.zeros_like(grad, dtype=torch.bool)
    dims = case.make().dims(grad)
    if dims:
        mask[tuple(slice(None) if d in dims else 0 for d in range(grad.dim()))] = True
    return mask


@BAD
@every(lambda case: case.nonfinite == "shown")
def test_a_mean_that_is_not_finite_is_not_hidden(case, bad):
    grads = with_bad(gradients(case.shapes), SICK, bad)
    (out,) = flow(case.make(), parameters(case.shapes), [grads])
    assert not out[SICK][unit_mask(case, grads[SICK])].isfinite().any()


@every(lambda case: case.nonfinite == "entry")
def test_an_entry_that_is_nan_stays_nan_and_an_infinite_one_meets_its_bound(case):
    grads = gradients(case.shapes)
    grads[SICK].view(-1)[:3] = torch.tensor([nan, inf, -inf])
    (out,) = flow(case.make(), parameters(case.shapes), [grads])
    assert out[SICK].isnan().sum() == 1
    assert out[SICK].view(-1)[0].isnan()
    assert out[SICK].isinf().sum() == 0
    assert out[SICK].view(-1)[1] == -out[SICK].view(-1)[2]


@BAD
@every(lambda case: case.nonfinite == "hidden")
def test_a_rule_that_hides_what_is_not_finite_lets_nothing_of_it_through(case, bad):
    grads = with_bad(gradients(case.shapes), SICK, bad)
    (out,) = flow(case.make(), parameters(case.shapes), [grads])
    assert all(u.isfinite().all() for u in out.values())
    assert not out or case.scope == "entry"


@BAD
@every(lambda case: case.nonfinite == "raises")
def test_a_rule_that_raises_names_the_parameter_and_changes_nothing(case, bad):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make(), Momentum(), LR(0.1))
    set_grads(params, with_bad(gradients(case.shapes), SICK, bad))
    with pytest.raises(RuntimeError, match=rf"{case.cls.__name__}.*\['{SICK}'\]"):
        opt.step()
    same(params, before)
    assert not any(opt.state.values())


@BAD
@every(lambda case: case.nonfinite == "stops")
def test_a_rule_that_stops_the_program_does_so_before_anything_changes(case, bad):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make(), Momentum(), LR(0.1))
    set_grads(params, with_bad(gradients(case.shapes), SICK, bad))
    with pytest.raises(RuntimeError, match=f"{case.cls.__name__}: NaN or infinite gradients"):
        opt.step()  # on CPU, where an assertion of the device is an error
    same(params, before)
    assert not any(opt.state.values())


@every(lambda case: case.memory == "guarded" and not remembers_inside(case))
def test_after_a_non_finite_step_a_guarded_rule_is_as_if_it_had_not_been(case):
    healthy = growing(case, 9)
    expected = flow(case.make(), parameters(case.shapes), healthy)
    names = {SICK} if case.scope == "mixed" else unit_of(case, SICK)  # of the sick unit
    end = 1 if case.scope == "entry" else None
    for warm, bad in zip((0, 1, 6, 6), (nan, -inf, inf, nan), strict=True):
        sick = [*healthy[:warm], with_bad(healthy[warm + 2], SICK, bad), *healthy[warm : warm + 3]]
        out = flow(case.make(), parameters(case.shapes), sick)
        del out[warm]
        for a, b in zip(out, expected[: warm + 3], strict=True):
            assert a.keys() == b.keys()
            for name in names & a.keys():
                x, y = a[name].view(-1)[:end], b[name].view(-1)[:end]
                assert x.equal(y), (name, warm, bad)


@BAD
@every(lambda case: case.memory == "guarded" and case.scope in ("entry", "tensor"))
def test_a_guarded_rule_loses_only_the_unit_that_was_not_finite(case, bad):
    healthy = growing(case, 4)
    sick = [*healthy[:2], with_bad(healthy[2], SICK, bad), healthy[3]]
    expected = flow(case.make(), parameters(case.shapes), healthy)
    out = flow(case.make(), parameters(case.shapes), sick)
    for a, b in zip(out, expected, strict=True):
        for name in a.keys() - {SICK}:
            assert a[name].equal(b[name]), name
        if case.scope == "entry":
            assert a[SICK].view(-1)[1:].equal(b[SICK].view(-1)[1:])


@BAD
@every(lambda c: c.memory == "guarded" and c.scope != "entry" and c.nonfinite != "hidden")
def test_the_non_finite_step_itself_comes_out_as_from_a_stateless_rule(case, bad):
    steps = growing(case, 8)  # long enough for a limit to stand
    steps[-1] = with_bad(steps[-1], SICK, bad)
    out = flow(case.make(), parameters(case.shapes), steps)[-1]
    for name in unit_of(case, SICK) if case.scope != "mixed" else {SICK}:
        finite = steps[-1][name].isfinite()
        if math.isnan(bad) or case.make().ord in ("std", "var"):
            assert out[name].isnan().all(), out[name]
        else:
            assert not out[name][finite].any(), out[name]
            assert out[name][~finite].isnan().all(), out[name]
