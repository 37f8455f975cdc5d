"""The numbers of the specification by hand: what holds for every rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.helpers import about
from tests.modules.numbers.common import CLIPPING, NORM_RULES, Bench, inf, nan, once
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Lion,
    Modular,
    Momentum,
    Normalize,
    Sign,
    SoftClip,
    WeightDecay,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CLIPPING)
def test_at_the_limit_nothing_changes_by_a_single_bit(name, dtype):
    grad = torch.tensor([3.0, 4.0], dtype=dtype)
    assert torch.equal(once(CLIPPING[name], grad)[0], grad)


@pytest.mark.parametrize("name", CLIPPING)
def test_random_bits_below_the_limit_are_kept(name):
    grad = torch.randn(257, generator=torch.Generator().manual_seed(3)) / 100
    assert torch.equal(once(CLIPPING[name], grad)[0], grad)


@pytest.mark.parametrize("dim", [None, "global", "group", "layer"])
@pytest.mark.parametrize("name", NORM_RULES)
def test_a_zero_norm_leaves_zeros_at_every_scope(name, dim):
    bench = Bench(NORM_RULES[name](dim), (3,), (2, 2), names=["a.w", "a.b"])
    for _ in range(3):
        updates = bench(torch.zeros(3), torch.zeros(2, 2))
        assert all(torch.equal(u, torch.zeros_like(u)) for u in updates)


@pytest.mark.parametrize("make", [ClipNorm, Normalize, SoftClip])
def test_zero_slices_stay_zero_beside_others(make):
    (u,) = once(make(1.0, dim=1), [[0.0, 0.0], [3.0, 4.0]])
    factor = 5 / 6 if make is SoftClip else 1
    assert u[0].tolist() == [0, 0]
    assert u[1].tolist() == about([0.6 * factor, 0.8 * factor])


def test_float16_300_400_has_norm_500():
    (u,) = once(ClipNorm(1.0), torch.tensor([300.0, 400.0], dtype=torch.float16))
    assert u.tolist() == about([0.6, 0.8], rel=5e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_that_leave_half_precision_do_not_matter(dtype):
    (u,) = once(Normalize(2.0), torch.full((4,), 60000.0, dtype=dtype))
    assert u.tolist() == [1.0] * 4


def test_a_thousand_bfloat16_ones_clip_to_one():
    ones = [torch.ones(1, dtype=torch.bfloat16)] * 1000
    updates = once(ClipNorm(1.0, dim="global"), *ones)
    total = math.sqrt(sum(u.double().item() ** 2 for u in updates))
    assert total == pytest.approx(1.004, abs=5e-4)  # 1/√1000 rounded to bfloat16, times √1000
    assert {u.item() for u in updates} == {torch.tensor(1000**-0.5).bfloat16().item()}


@pytest.mark.parametrize("size", [1e20, 1e-30, 1e-42, 3e38])
@pytest.mark.parametrize("ord", [0.5, 1, 2, 3, inf, "mad", "l4"])
def test_values_at_the_ends_of_float32_are_normalised(size, ord):
    (u,) = once(Normalize(1.0, ord), [3 * size / 4, -size])
    a, b = float(torch.tensor(3 * size / 4)), float(torch.tensor(size))
    if ord == inf:
        norm = b
    elif ord == "mad":
        norm = (a + b) / 2
    else:
        p = 4 if ord == "l4" else ord
        norm = b * ((a / b) ** p + 1) ** (1 / p)
    assert u.tolist() == about([a / norm, -b / norm])


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_huge_values_are_clipped(size):
    (u,) = once(ClipNorm(1.0), [size * 0.6, -size * 0.8])
    assert u.tolist() == about([0.6, -0.8])


@pytest.mark.parametrize("size", [1e-30, 1e-38])
def test_tiny_values_are_clipped(size):
    (u,) = once(ClipNorm(size / 2), [size * 0.6, -size * 0.8])
    assert u.tolist() == about([size * 0.3, -size * 0.4])


def test_float64_norms_are_right_to_1e_12():
    grad = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = math.sqrt(math.fsum(x * x for x in grad.tolist()))
    (u,) = once(Normalize(1.0), grad)
    assert (u / grad).tolist()[0] == about(1 / exact, rel=1e-12)


@pytest.mark.parametrize("dim", [None, "global", "group", "layer", 0, (0, -1)])
@pytest.mark.parametrize(
    "make", [ClipNorm, Normalize, SoftClip], ids=["ClipNorm", "Normalize", "SoftClip"]
)
def test_a_nan_norm_gives_nan(make, dim):
    (u,) = once(make(1.0, dim=dim), [1.0, nan, 2.0], names=["a.b"])
    assert u.isnan().all()


@pytest.mark.parametrize("dim", [None, "global", "group", "layer", 0])
@pytest.mark.parametrize(
    "make", [ClipNorm, Normalize, SoftClip], ids=["ClipNorm", "Normalize", "SoftClip"]
)
def test_an_infinite_norm_zeroes_finite_entries_and_makes_the_others_nan(make, dim):
    (u,) = once(make(1.0, dim=dim), [1.0, -inf, 2.0], names=["a.b"])
    assert u.tolist() == about([0.0, nan, 0.0])


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["ClipNormGrowth", "ClipNormByEMA", "NormalizeByEMA"])
@pytest.mark.parametrize("dim", [None, "global"])
def test_a_stateful_norm_rule_answers_a_bad_step_like_a_stateless_one_and_forgets_it(
    name, dim, bad
):
    rule = NORM_RULES[name](dim)
    poisoned, clean = Bench(rule, 2), Bench(rule, 2)
    for grad in ([3.0, 4.0], [6.0, 8.0]):
        poisoned(grad), clean(grad)
    (u,) = poisoned([1.0, bad])
    assert u.tolist() == about([nan, nan] if math.isnan(bad) else [0.0, nan])
    for grad in ([60.0, 80.0], [3.0, 4.0]):
        assert torch.equal(poisoned(grad)[0], clean(grad)[0])


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["ClipNormGrowth", "ClipNormByEMA", "NormalizeByEMA"])
def test_a_bad_first_step_leaves_the_rule_as_if_new(name, bad):
    poisoned, clean = Bench(NORM_RULES[name](None), 2), Bench(NORM_RULES[name](None), 2)
    poisoned([1.0, bad])
    for grad in ([3.0, 4.0], [6.0, 8.0], [60.0, 80.0]):
        assert torch.equal(poisoned(grad)[0], clean(grad)[0])


@pytest.mark.parametrize("name", ["ClipNormGrowth", "ClipNormByEMA", "NormalizeByEMA"])
def test_a_bad_tensor_does_not_touch_the_memory_of_another(name):
    poisoned, clean = Bench(NORM_RULES[name](None), 2, 2), Bench(NORM_RULES[name](None), 2, 2)
    for bench in (poisoned, clean):
        bench([3.0, 4.0], [3.0, 4.0])
    poisoned([nan, 1.0], [6.0, 8.0]), clean([6.0, 8.0], [6.0, 8.0])
    assert torch.equal(poisoned([9.0, 12.0], [9.0, 12.0])[1], clean([9.0, 12.0], [9.0, 12.0])[1])


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("rule", [ClipValueGrowth(), ClipValueByEMA(0.5)], ids=repr)
def test_a_bad_entry_leaves_its_own_memory_and_that_of_the_others(rule, bad):
    poisoned, clean = Bench(rule, 2), Bench(rule, 1)
    for x in (1.0, 2.0):
        poisoned([x, x]), clean([x])
    poisoned([bad, 3.0])
    (u,) = poisoned([100.0, 100.0])
    assert u[0].item() == clean([100.0])[0].item()
    reference = Bench(rule, 1)
    for x in (1.0, 2.0, 3.0):
        reference([x])
    assert u[1].item() == reference([100.0])[0].item()


@pytest.mark.parametrize("links", [Adam(), Momentum(), EMA(), Lion()], ids=repr)
def test_descent_links_take_a_nan_in_as_torch_does(links):
    bench = Bench(links, 1)
    bench([1.0]), bench([nan])
    assert torch.isnan(bench.opt.state[bench.params[0]][next(iter(_averages(bench)))]).all()


def _averages(bench):
    state = bench.opt.state[bench.params[0]]
    return [k for k, v in state.items() if v.dim() and v.is_floating_point()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("dim", [None, 0, 1, (0, 1), "global"])
def test_the_order_of_parameters_never_matters(order, dim):
    gen = torch.Generator().manual_seed(1)
    grads = [torch.randn(s, generator=gen) for s in [(64,), (64, 64), (4, 3, 2)]]
    straight = once(ClipNorm(1.0, dim=dim), *grads)
    permuted = once(ClipNorm(1.0, dim=dim), *[grads[i] for i in order])
    for place, i in enumerate(order):
        torch.testing.assert_close(permuted[place], straight[i], rtol=1e-6, atol=0)


def test_a_bias_first_does_not_decide_how_a_weight_is_clipped():
    gen = torch.Generator().manual_seed(1)
    bias, weight = once(
        ClipNorm(1.0), torch.randn(64, generator=gen), torch.randn(64, 64, generator=gen)
    )
    assert bias.norm().item() == about(1.0)
    assert weight.norm().item() == about(1.0)


def test_a_bfloat16_average_does_not_stall():
    bench = Bench(EMA(0.999), 1, dtype=torch.bfloat16)
    for _ in range(1500):  # in bfloat16 it would end at 0.25
        (u,) = bench([1.0])
    assert u.item() == pytest.approx(1 - 0.999**1500, rel=1e-2)
    state = bench.opt.state[bench.params[0]]["EMA/ema"]
    assert state.dtype == torch.float32
    assert state.item() == about(1 - 0.999**1500, rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        ClipValue,
        ClipNorm,
        lambda n: ClipNorm(n, dim="global"),
        lambda n: ClipNorm(n, dim=0),
        Normalize,
        ClipRMS,
        SoftClip,
    ],
    ids=["ClipValue", "ClipNorm", "global", "slices", "Normalize", "ClipRMS", "SoftClip"],
)
def test_a_limit_of_zero_gives_zeros(make):
    assert once(make(0.0), [3.0, -4.0])[0].tolist() == [0, 0]


@pytest.mark.parametrize("entry", [3.0, inf])
@pytest.mark.parametrize("ord", [1, 2, inf, "std", "var", "l0", "sum"])
def test_a_limit_of_inf_never_clips_not_even_an_infinite_norm(ord, entry):
    grad = [1.0, entry, -2.0]
    assert once(ClipNorm(inf, ord), grad)[0].tolist() == grad
    assert once(ClipRMS(inf), grad)[0].tolist() == grad
    assert once(SoftClip(inf), grad)[0].tolist() == grad
    assert once(ClipValue(inf), grad)[0].tolist() == grad


def test_complex_norms_are_those_of_the_modulus():
    grad = torch.tensor([3 + 4j, 0j, -12j])
    (u,) = once(ClipNorm(1.0), grad)
    torch.testing.assert_close(u, grad / 13)
    (u,) = once(Normalize(1.0, "linf"), grad)
    torch.testing.assert_close(u, grad / 12)
    (u,) = once(Normalize(1.0, 1), grad)
    torch.testing.assert_close(u, grad / 17)
    (u,) = once(Normalize(1.0, "sum"), grad)
    torch.testing.assert_close(u, grad / abs(3 + 4j - 12j))


def test_a_complex_spread_is_that_of_the_distances_from_the_mean():
    grad = torch.tensor([1 + 1j, -1 - 1j, 2 - 2j, -2 + 2j])
    var = (2 + 2 + 8 + 8) / 3
    torch.testing.assert_close(once(Normalize(1.0, "std"), grad)[0], grad / math.sqrt(var))
    torch.testing.assert_close(once(Normalize(1.0, "var"), grad)[0], grad / math.sqrt(var))


def test_growth_and_averages_of_complex_norms_work():
    bench = Bench(ClipNormGrowth(), 1, dtype=torch.complex64)
    sizes = [bench([x])[0].abs().item() for x in (0.6 + 0.8j, 10j, -10.0)]
    assert sizes == about([1, 1.5, 2.25])
    bench = Bench(ClipNormByEMA(), 1, dtype=torch.complex64)
    assert [bench([0.6 + 0.8j])[0].abs().item() for _ in range(3)] == about([0.01, 0.015, 0.0225])


@pytest.mark.parametrize(
    "rule",
    [ClipValue(1.0), ClipPercentile(50), ClipValueGrowth(), ClipValueByEMA(), Sign()],
    ids=repr,
)
def test_clipping_values_of_complex_tensors_is_a_clear_error(rule):
    with pytest.raises(TypeError, match=rf"{type(rule).__name__} .*complex.*complex64"):
        once(rule, torch.tensor([1 + 1j]))


@pytest.mark.parametrize("target", ["update", "grad"])
def test_a_sparse_gradient_is_an_error_that_names_shape_and_place(target):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(10, 3, sparse=True)])
    opt = Modular(model.parameters(), ClipNorm(1.0, target=target), LR(0.1))
    model[1](torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"sparse.*\(10, 3\).*parameter 2 of group 0"):
        opt.step()


@pytest.mark.parametrize("dim", [None, "global", 0, (0, 1)])
def test_empty_and_0_dim_tensors_count_as_what_they_are(dim):
    scalar, empty, matrix = once(
        ClipNorm(1.0, dim=dim), torch.tensor(3.0), torch.zeros(0, 2), torch.tensor([[4.0]])
    )
    assert empty.shape == (0, 2)
    if dim == "global":
        assert (scalar.item(), matrix.item()) == about((0.6, 0.8))
    else:  # a 0-dim tensor has no slices
        assert (scalar.item(), matrix.item()) == about((3.0 if dim is not None else 1.0, 1.0))


def test_non_contiguous_and_channels_last_gradients_give_what_contiguous_ones_give():
    gen = torch.Generator().manual_seed(5)
    image = torch.randn(2, 3, 4, 5, generator=gen)
    for dim in (None, 1, (0, -1), "global"):
        expected = once(ClipNorm(1.0, dim=dim), image)[0]
        last = image.to(memory_format=torch.channels_last)
        strided = image.transpose(0, 3).contiguous().transpose(0, 3)
        for grad in (last, strided):
            torch.testing.assert_close(once(ClipNorm(1.0, dim=dim), grad)[0], expected)


def test_mixed_dtypes_in_one_model_share_one_global_norm():
    a = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    c = torch.zeros(1, dtype=torch.complex64, requires_grad=True)
    for p, value in ((a, 3.0), (b, 4.0), (c, 12j)):
        p.grad = torch.full_like(p, value)
    Modular([a, b, c], ClipNorm(1.0, dim="global")).step()
    assert -a.item() == about(3 / 13, rel=1e-3)
    assert -b.item() == about(4 / 13, rel=1e-12)
    assert -c.item() == about(12j / 13)


@pytest.mark.parametrize("dim", [None, "global", "group"])
def test_a_parameter_without_gradient_is_not_touched_and_has_no_state(dim):
    bench = Bench((ClipNormByEMA(dim=dim), Adam(), WeightDecay(0.1), LR(0.1)), 2, 2)
    bench.params[1].data.fill_(7.0)
    bench.params[0].grad = torch.ones(2)
    bench.opt.step()
    assert bench.params[1].tolist() == [7.0, 7.0]
    assert bench.params[1] not in bench.opt.state
