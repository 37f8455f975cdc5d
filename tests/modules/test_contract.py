"""What every transform promises. Each test is one contract, run over the whole table."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import re
from collections import Counter
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import (
    SHAPES,
    Named,
    Tensors,
    at_once,
    close,
    flow,
    gradients,
    parameters,
    same,
    set_grads,
)
from tests.modules.rows.row import Row
from tests.table import (
    GOOD,
    LOOSE,
    ROWS,
    Case,
    concrete,
    every,
    other_values,
    over,
    required,
    sampled,
)
from torchzero_clip import LR, Adam, Chain, ClipNorm, Modular, Momentum
from torchzero_clip.audit import fake_cuda
from torchzero_clip.core.norms import measure

inf, nan = math.inf, math.nan
EXACT = ("step", "started", "lr_max", "weight_sum", "d", "d_max", "numerator")
"""Numbers whose dtype is not the parameters': counts, as in torch.optim, and sums of a run."""
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def growing(case: Case, steps: int, **kwargs: Any) -> list[Tensors]:
    """Gradients that grow from step to step, so that every limit is met."""
    scale = kwargs.pop("scale", 1.0)
    return [gradients(case.shapes, i, scale=scale * (i + 1), **kwargs) for i in range(steps)]


# ---------------------------------------------------------------------- the table itself


def test_every_public_transform_has_a_row():
    assert {row.cls.__name__ for row in ROWS} == concrete()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.cls.__name__)
def test_a_row_names_the_required_arguments_and_makes_its_class(row):
    assert row.good
    if row.cls is not Chain:
        assert set(row.args) == required(row.cls)
        made = [[*x] if isinstance(x := make(), Chain) else [x] for make in row.good.values()]
        assert any(type(x) is row.cls for links in made for x in links)


# ---------------------------------------------------------------------- zero


@every()
def test_zero_gradients_give_zero_or_what_the_parameters_add(case):
    params, zeros = parameters(case.shapes), gradients(case.shapes, scale=0.0)
    for out in flow(case.make(), params, [zeros] * 3):
        for name, u in out.items():
            assert u.isfinite().all(), name
            assert case.adds or not u.any(), name


@every()
def test_a_zero_gradient_after_others_gives_finite_values(case):
    steps = [*growing(case, 2), gradients(case.shapes, scale=0.0), *growing(case, 2)]
    for out in flow(case.make(), parameters(case.shapes), steps):
        assert all(u.isfinite().all() for u in out.values())


@every()
def test_one_tensor_of_zeros_among_others_stays_zero(case):
    grads = growing(case, 3)
    for step in grads:
        step[SICK].zero_()
    params = parameters(case.shapes)
    for out in flow(case.make(), params, grads):
        assert all(u.isfinite().all() for u in out.values())
        if not (case.adds or case.nonfinite == "shown"):  # a common mean is taken off zeros too
            assert SICK not in out or not out[SICK].any()


@every()
def test_a_step_with_zero_gradients_and_lr_0_changes_no_parameter(case):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.0)]))
    for group in opt.param_groups:
        group["lr"] = 0.0
    set_grads(params, gradients(case.shapes, scale=0.0))
    opt.step()
    same(params, before)


def owns_lr(case: Case) -> bool:
    return any("lr" in tfm.live for tfm in case.make().walk())


# ---------------------------------------------------------------------- NaN and infinity


def with_bad(grads: Tensors, name: str, value: float) -> Tensors:
    """The gradients with one bad entry."""
    grads = {n: g.clone() for n, g in grads.items()}
    grads[name].view(-1)[0] = value
    return grads


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
SICK = "embed.weight"


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
    for warm, bad in itertools.product((0, 1, 6), BAD_VALUES):
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


# ---------------------------------------------------------------------- range and precision


@at_once("scale", [1e20, 1e-20, 1e-30, 1e-41])
@every(lambda case: case.exact and not case.squares)
def test_extreme_values_come_out_as_in_double_precision(case, scale):
    if scale == 1e20 and case.memory != "none" and getattr(case.make(), "ord", 2) == "var":
        pytest.skip("a variance of 1e40 does not fit the float32 that state is kept in")
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
    shapes = {"layer.a": (2, 2), "layer.b": (2, 2)}
    half = {name: torch.full(shape, 60000.0).half() for name, shape in shapes.items()}
    half["layer.b"][0] = -30000.0
    double = {name: g.double() for name, g in half.items()}
    low = {name: Parameter(torch.ones(2, 2).half()) for name in half}
    high = {name: Parameter(torch.ones(2, 2).double()) for name in half}
    (out,), (expected,) = flow(case.make(), low, [half]), flow(case.make(), high, [double])
    assert all(u.isfinite().all() for u in out.values())
    close(out, expected, rtol=1e-3, atol=1e-3)


@every()
def test_state_is_single_precision_for_half_parameters_and_double_for_double(case):
    for dtype in DTYPES:
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


@at_once("dtype", DTYPES[:-1])
@every(lambda case: case.exact)
def test_every_dtype_gives_what_double_precision_gives_for_the_same_values(case, dtype):
    low = growing(case, 3, dtype=dtype)
    high = [{name: g.double() for name, g in step.items()} for step in low]
    params = parameters(case.shapes, dtype)
    exact = {name: Parameter(p.detach().double()) for name, p in params.items()}
    out, expected = flow(case.make(), params, low), flow(case.make(), exact, high)
    eps = torch.finfo(dtype).eps  # a stateless link may work in the parameter's own precision
    for a, b in zip(out, expected, strict=True):
        largest = max([1.0, *(float(t.abs().max()) for t in b.values())])
        close(a, b, rtol=max(4 * eps, 1e-14), atol=max(4 * eps, 1e-14) * largest)


# ---------------------------------------------------------------------- shapes and layouts


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
    some = {"embed.a": (), "embed.b": (3,)}
    other = {"embed.a": (1,), "embed.b": (3,)}
    steps = [gradients(some, i, scale=i + 1) for i in range(3)]
    out = flow(case.make(), parameters(some), steps)
    rule = case.make()
    if getattr(rule, "scope", None) is not None and not (  # nothing to slice
        isinstance(rule.scope, str) or rule.dims(torch.zeros(()))
    ):
        for a, step in zip(out, steps, strict=True):
            assert a["embed.a"].equal(step["embed.a"])
        return
    steps = [{name: g.view(other[name]) for name, g in step.items()} for step in steps]
    params = {n: Parameter(p.detach().view(other[n])) for n, p in parameters(some).items()}
    for a, b in zip(out, flow(case.make(), params, steps), strict=True):
        close({name: u.view(other[name]) for name, u in a.items()}, b)


def transposed(t: Tensor) -> Tensor:
    """The same values in the memory order of the transpose."""
    return t.t().contiguous().t() if t.dim() == 2 else t


def strided(t: Tensor) -> Tensor:
    """The same values with gaps between them."""
    if not t.dim():
        return t
    memory = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    memory[..., ::2] = t
    return memory[..., ::2]


def channels_last(t: Tensor) -> Tensor:
    """The same values with the channels last in memory."""
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


LAYOUTS = (transposed, strided, channels_last)


@every()
def test_the_memory_layout_changes_nothing(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    expected = flow(case.make(), params, steps)
    tolerance = {} if case.exact else {"rtol": 2e-2, "atol": 2e-2}
    for layout in LAYOUTS:
        others = [{name: layout(g) for name, g in step.items()} for step in steps]
        moved = {name: Parameter(layout(p.detach())) for name, p in params.items()}
        for given, taken in ((params, others), (moved, steps), (moved, others)):
            changed = [t for t in (*taken[0].values(), *given.values()) if not t.is_contiguous()]
            assert changed  # or the test would compare nothing
            for a, b in zip(flow(case.make(), given, taken), expected, strict=True):
                close(a, b, **tolerance)


@every()
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


# ---------------------------------------------------------------------- who takes part


@every(lambda case: not case.draws)
def test_the_default_device_does_not_matter(case):
    steps = growing(case, 4)
    expected = flow(case.make(), parameters(case.shapes), steps)
    rule, params = case.make(), parameters(case.shapes)
    with torch.device("meta"):
        found = flow(rule, params, steps)
    same(found, expected)


@every()
def test_parameters_without_a_gradient_are_untouched_and_have_no_state(case):
    params = parameters(case.shapes)
    frozen = params["head.weight"].requires_grad_(False)
    missing = params["conv.weight"]
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make())
    for step in growing(case, 2):
        set_grads(
            params, {n: g for n, g in step.items() if n not in ("head.weight", "conv.weight")}
        )
        opt.step()
    for name, p in (("head.weight", frozen), ("conv.weight", missing)):
        assert p.equal(before[name])
        assert p.grad is None
        assert p not in opt.state or not opt.state[p]


@every()
def test_a_parameter_without_a_gradient_counts_for_nobody(case):
    names = [name for name in case.shapes if name != "conv.weight"]
    few = {name: case.shapes[name] for name in names}
    steps = [{n: g for n, g in step.items() if n in few} for step in growing(case, 3)]
    out = flow(case.make(), parameters(case.shapes), steps)
    for a, b in zip(out, flow(case.make(), parameters(few), steps), strict=True):
        same(a, b)


@every()
def test_no_gradients_at_all_is_a_step_that_does_nothing(case):
    params = parameters(case.shapes)
    before = {name: p.detach().clone() for name, p in params.items()}
    opt = Modular(params.items(), case.make())
    opt.step()
    same(params, before)
    assert not opt.state


@every()
def test_a_sparse_gradient_raises_a_sentence_and_changes_nothing(case):
    params = parameters(case.shapes)
    opt = Modular(params.items(), case.make())
    set_grads(params, gradients(case.shapes))
    params["conv.weight"].grad = params["conv.weight"].grad.to_sparse()
    before = {name: p.detach().clone() for name, p in params.items()}
    place = list(case.shapes).index("conv.weight")
    sentence = rf"sparse gradients.*\(2, 3, 2, 2\).*parameter {place} of group 0"
    with pytest.raises(TypeError, match=sentence):
        opt.step()
    same(params, before)
    assert not opt.state


# ---------------------------------------------------------------------- complex numbers


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


# ---------------------------------------------------------------------- units, groups, order


@every(lambda case: not case.draws)
def test_the_order_of_the_parameters_changes_nothing(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    backwards = dict(reversed(params.items()))
    expected = flow(case.make(), params, steps)
    for a, b in zip(flow(case.make(), backwards, steps), expected, strict=True):
        close({name: a[name] for name in b}, b)


@every(lambda case: not case.draws)
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


@every(lambda case: case.scope not in ("global", "layer", "mixed") and not case.draws)
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


# ---------------------------------------------------------------------- target


@every()
def test_an_update_rule_never_writes_the_gradient_or_the_parameter(case):
    steps, params = growing(case, 3), parameters(case.shapes)
    kept = copy.deepcopy(steps)
    before = {name: p.detach().clone() for name, p in params.items()}
    probed = flow(case.make(), params, steps)
    assert len(probed) == 3
    for step, old in zip(steps, kept, strict=True):
        same(step, old)
    same(params, before)


@at_once("dtype", DTYPES)
@every(lambda case: case.aims and type(case.make()) is case.cls)
def test_a_gradient_rule_writes_into_the_gradient_what_would_have_flowed(case, dtype):
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


# ---------------------------------------------------------------------- identity


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


# ---------------------------------------------------------------------- descriptions


@every()
def test_a_transform_cannot_be_changed(case):
    tfm = case.make()
    for name in tfm.__dataclass_fields__:
        with pytest.raises(AttributeError, match=f"{type(tfm).__name__}.{name} cannot be set"):
            setattr(tfm, name, 1.0)


@every()
def test_one_transform_serves_two_optimizers(case):
    shared, description = case.make(), repr(case.make())
    kept = dict(vars(shared))
    runs = []
    for tfms in ([shared, shared], [case.make(), case.make()]):
        models = [parameters(case.shapes), parameters(case.shapes)]
        tail = [] if owns_lr(case) else [LR(0.1)]
        opts = [Modular(m.items(), t, *tail) for m, t in zip(models, tfms, strict=True)]
        for i in range(4):  # one starts late, and sees other gradients
            for j in range(2) if i else range(1):
                set_grads(models[j], gradients(case.shapes, 10 * j + i, scale=i + 1))
                opts[j].step()
        runs.append(models)
    for a, b in zip(*runs, strict=True):
        same(a, b)
    assert repr(shared) == description
    assert vars(shared) == kept


# ---------------------------------------------------------------------- copies


def by_deepcopy(opt: Modular) -> Modular:
    return copy.deepcopy(opt)


def by_pickle(opt: Modular) -> Modular:
    return pickle.loads(pickle.dumps(opt))


def by_torch_save(opt: Modular) -> Modular:
    memory = io.BytesIO()
    torch.save(opt, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@every()
def test_a_copy_of_an_optimizer_in_mid_training_continues_to_the_last_bit(case):
    params = parameters(case.shapes)
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    for step in growing(case, 3):
        set_grads(params, step)
        opt.step()
    copies = [duplicate(opt) for duplicate in (by_deepcopy, by_pickle, by_torch_save)]
    models = [dict(zip(params, c.param_groups[0]["params"], strict=True)) for c in copies]
    for name in params:
        assert len({id(model[name]) for model in (params, *models)}) == 4
    for i in range(3, 7):
        grads = gradients(case.shapes, i, scale=i + 1)
        for model, optimizer in zip((params, *models), (opt, *copies), strict=True):
            set_grads(model, {name: g.clone() for name, g in grads.items()})
            optimizer.step()
        for model in models:
            same(model, params)


# ---------------------------------------------------------------------- devices


def on(device: Any, case: Case, live: Any = None) -> tuple[Named, Modular]:
    """A model on a device (a function of the place picks several), live values there as well."""
    pick = device if callable(device) else (lambda i: device)
    shapes = case.shapes.items()
    params = {
        name: Parameter(torch.empty(shape, device=pick(i)))
        for i, (name, shape) in enumerate(shapes)
    }
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    for group in opt.param_groups if live is not None else ():
        for key in opt.keys.defaults:
            group[key] = as_tensor(group[key], live)
    return params, opt


def as_tensor(value: Any, device: Any) -> Any:
    """A live value as a 0-dim tensor on a device."""
    if isinstance(value, tuple):
        return tuple(as_tensor(v, device) for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    kind = torch.int64 if isinstance(value, int) else torch.float32
    return torch.full((), value, dtype=kind, device=device)


LIVE = at_once("live", [False, True])


def on_devices(case: Case) -> bool:
    """Whether the rule can run on a device without values: a fake one has no random numbers."""
    return not case.reads_host and not case.draws


@LIVE
@sampled(on_devices)
def test_no_value_on_the_device_is_read_by_the_host(case, live):
    """Tensors on the meta device have no values: reading one, or copying it away, raises."""
    params, opt = on("meta", case, "meta" if live else None)
    for _ in range(2):
        set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
        opt.step()
    with pytest.raises((RuntimeError, NotImplementedError)):  # that it raises here is the premise
        params["embed.weight"].sum().item()


@pytest.mark.parametrize(
    "live",
    [pytest.param(False, id="numbers", marks=pytest.mark.slow), pytest.param(True, id="tensors")],
)
@sampled(on_devices)
def test_an_accelerator_is_neither_read_nor_mixed_with_the_host(case, live):
    """A fake CUDA device raises where a value is read or two devices meet in one operator. Nothing
    is copied to or from the host where all values lie on the device, as a CUDA graph needs it."""
    with fake_cuda(), NoCopyToHost():
        params, opt = on("cuda", case, "cuda" if live else None)
        for _ in range(3):
            set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
            with Copies() as copies:
                opt.step()
        held = [value for memory in opt.state.values() for value in memory.values()]
        held += [v for group in opt.param_groups for v in group["chain"].values()]
        for value in held:
            assert not isinstance(value, Tensor) or value.device.type == "cuda"
    if live and case.traces and case.graphs == 1:  # no choice by the host
        assert copies.made == Counter()


@sampled(on_devices)
def test_a_model_may_lie_on_two_devices(case):
    with fake_cuda(), NoCopyToHost():
        params, opt = on(lambda i: f"cuda:{i % 2}", case)
        for _ in range(2):
            set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
            opt.step()
        for p in params.values():
            held = {k: v for k, v in opt.state.get(p, {}).items() if isinstance(v, Tensor)}
            for key, value in held.items():
                shared = case.scope == "layer" and value.shape != p.shape  # by a layer's tensors
                assert shared or value.device == p.device, key


class NoCopyToHost(TorchDispatchMode):
    """Raises where an accelerator's tensor is copied to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
            assert out.device == source.device or out.device.type != "cpu", func
        return out


class Copies(TorchDispatchMode):
    """Counts the copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != out.device.type:
                self.made[source.device.type, out.device.type] += 1
        return out


def test_the_counter_sees_a_copy():
    with fake_cuda(), Copies() as copies:
        torch.tensor([1.0, 2.0], device="cuda")
    assert copies.made == Counter({("cpu", "cuda"): 1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every(lambda case: not case.reads_host)
def test_a_cuda_device_is_never_waited_for(case):
    params, opt = on("cuda", case)
    steps = growing(case, 3)
    for i, step in enumerate(steps):
        set_grads(params, {name: g.cuda() for name, g in step.items()})
        torch.cuda.set_sync_debug_mode("error" if i else "default")  # state is made in step 0
        try:
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- cost


class Count(TorchDispatchMode):
    """Counts operator calls by name, without views, which start nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls(case: Case, count: int, device: str) -> Counter[str]:
    """The operators of the third step of a model of so many tensors."""
    shape = (3, 2)
    params = {
        f"layer{i // 2}.{i}weight": Parameter(torch.ones(shape, device=device))
        for i in range(count)
    }
    opt = Modular(params.items(), case.make(), *([] if owns_lr(case) else [LR(0.1)]))
    grads = {name: torch.full(shape, 0.5 + i / count) for i, name in enumerate(params)}
    set_grads(params, {name: g.to(device) for name, g in grads.items()})
    opt.step()
    opt.step()
    with Count() as counter:
        opt.step()
    return counter.calls


MEASURES = {"max": 1, "count": 1, "sum": 1, "spread": 3}  # no foreach operator measures these


@at_once("device", ["cpu", "meta"])
@sampled(lambda case: case.scope != "slices")
def test_the_number_of_operators_does_not_grow_with_the_number_of_tensors(case, device):
    if device == "meta" and not on_devices(case):
        pytest.skip("needs the values")
    few, many = calls(case, 4, device), calls(case, 10, device)
    more = {name: round((many[name] - few[name]) / 6) for name in many}  # a branch is no loop
    ord = getattr(case.make(), "ord", 2)
    measures = case.row.measures * MEASURES.get(measure(ord).kind, 0)
    assert sum(more.values()) <= case.loops + measures, +Counter(more)


def test_a_step_of_a_thousand_tensors_takes_a_hundred_operators():
    case = Case(Row(Chain, {}), "chain", lambda: Chain(ClipNorm(1.0, dim="global"), Adam()))
    assert calls(case, 1000, "cpu").total() < 100


def test_the_counter_sees_what_a_loop_does():
    with Count() as counter:
        for t in torch.ones(7, 2).unbind():
            t.add_(1)
    assert counter.calls["aten.add_.Tensor"] == 7


# ---------------------------------------------------------------------- nothing is forgotten


def test_the_cases_reach_every_scope_and_every_kind():
    scopes = {case.scope for case in GOOD}
    assert scopes == {"entry", "tensor", "slices", "layer", "group", "global", "mixed"}
    for flag in ("nonfinite", "memory", "complex"):
        assert {getattr(row, flag) for row in ROWS} == set(get_args(get_type_hints(Row)[flag]))
    assert any(len(shape) == 4 for shape in SHAPES.values())  # or channels_last tests nothing
