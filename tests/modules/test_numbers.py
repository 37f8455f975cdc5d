"""The numbers of the specification, worked out by hand, one property a test."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import about, at_once, param
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Cautious,
    Centralize,
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
    NanToNum,
    Normalize,
    NormalizeByEMA,
    Scale,
    Sign,
    SoftClip,
    Standardize,
    Warmup,
    WeightDecay,
)

inf, nan = math.inf, math.nan


class Bench:
    """A chain on some parameters: gradients in, what is subtracted out."""

    def __init__(self, links, *shapes, dtype=torch.float32, groups=None, names=None):
        links = links if isinstance(links, tuple) else (links,)
        self.params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        given = self.params
        if groups is not None:
            given = [{"params": [p], **keys} for p, keys in zip(given, groups, strict=True)]
        if names is not None:
            given = list(zip(names, self.params, strict=True))
        self.opt = Modular(given, *links)

    def __call__(self, *grads):
        """One step; the parameters start at zero, so minus them is the update."""
        for p, grad in zip(self.params, grads, strict=True):
            p.data.zero_()
            p.grad = None if grad is None else torch.as_tensor(grad).to(p.dtype)
        self.opt.step()
        return [0 - p.detach() for p in self.params]


def once(links, *grads, dtype=torch.float32, **keys):
    """The updates of one step, one for each gradient."""
    grads = [g if isinstance(g, Tensor) else torch.tensor(g, dtype=dtype) for g in grads]
    return Bench(links, *[g.shape for g in grads], dtype=grads[0].dtype, **keys)(*grads)


def sequence(links, inputs, dtype=torch.float32):
    """What one parameter of one element gets, step by step."""
    bench = Bench(links, 1, dtype=dtype)
    return [bench([float(x)])[0].item() for x in inputs]


CLIPPING = {
    "ClipValue": ClipValue(5.0),
    "ClipNorm": ClipNorm(5.0),
    "ClipNorm global": ClipNorm(5.0, dim="global"),
    "ClipNorm slices": ClipNorm(5.0, dim=0),
    "ClipNorm l1": ClipNorm(7.0, "l1"),
    "ClipRMS": ClipRMS(math.sqrt(12.5)),
    "ClipPercentile": ClipPercentile(100),
    "ClipNormGrowth": ClipNormGrowth(),
    "ClipValueGrowth": ClipValueGrowth(),
    "ClipNormByEMA": ClipNormByEMA(0.0),
    "ClipValueByEMA": ClipValueByEMA(0.0),
}
NORM_RULES = {
    "ClipNorm": lambda dim: ClipNorm(1.0, dim=dim),
    "Normalize": lambda dim: Normalize(1.0, dim=dim),
    "ClipRMS": lambda dim: ClipRMS(1.0, dim=dim),
    "SoftClip": lambda dim: SoftClip(1.0, dim=dim),
    "Standardize": lambda dim: Standardize(dim=dim),
    "ClipNormGrowth": lambda dim: ClipNormGrowth(dim=dim),
    "ClipNormByEMA": lambda dim: ClipNormByEMA(dim=dim),
    "NormalizeByEMA": lambda dim: NormalizeByEMA(dim=dim),
}


# --- §0 for every rule


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


# --- norm orders


@at_once(
    "ord, norm",
    [
        (0.5, (1 + math.sqrt(2) + 2) ** 2),
        (1, 7),
        ("l1", 7),
        (2, math.sqrt(21)),
        ("l2", math.sqrt(21)),
        (3, 73 ** (1 / 3)),
        ("l3", 73 ** (1 / 3)),
        ("l4", 273**0.25),
        (7, (1 + 2**7 + 4**7) ** (1 / 7)),
        (inf, 4),
        ("linf", 4),
        ("mad", 7 / 4),
        ("sum", 3),
        ("std", 2.5),
        (0, 3),
        ("l0", 3),
    ],
)
@at_once("dim", [None, 0, "global"])
def test_normalize_divides_by_the_measure(ord, norm, dim):
    grad = torch.tensor([1.0, -2.0, 4.0, 0.0])
    (u,) = once(Normalize(1.0, ord, dim), grad)
    assert u.tolist() == about((grad / norm).tolist())


@pytest.mark.parametrize("dim", [None, 0, "global", "layer", "group"])
def test_var_meets_the_limit_itself(dim):
    grad = torch.tensor([1.0, -2.0, 4.0, 0.0])  # variance 6.25
    for rule in (ClipNorm(1.0, "var", dim), Normalize(1.0, "var", dim)):
        (u,) = once(rule, grad, names=["a.b"])
        assert u.tolist() == about((grad * math.sqrt(1 / 6.25)).tolist())
        assert u.var().item() == about(1.0)
    (u,) = once(Normalize(25.0, "var", dim), grad, names=["a.b"])
    assert u.var().item() == about(25.0)


def test_a_single_element_has_no_spread_to_clip():
    for ord in ("std", "var"):
        assert once(ClipNorm(1e-3, ord), [5.0])[0].tolist() == [5.0]
        assert once(Normalize(1e-3, ord), [5.0])[0].tolist() == [5.0]
        (u,) = once(Normalize(1e-3, ord, 1), [[5.0], [6.0]])
        assert u.tolist() == [[5.0], [6.0]]


@pytest.mark.parametrize("ord", ["std", "var"])
def test_std_and_var_of_several_tensors_are_those_of_all_their_entries(ord):
    gen = torch.Generator().manual_seed(2)
    parts = [torch.randn(n, generator=gen).double() * n + n for n in (1, 3, 50)]
    whole = torch.cat(parts)
    measured = whole.std() if ord == "std" else whole.var()
    factor = 1 / measured if ord == "std" else (1 / measured).sqrt()
    updates = once(Normalize(1.0, ord, "global"), *parts)
    torch.testing.assert_close(torch.cat(updates), whole * factor, rtol=1e-12, atol=0)


# --- scope


def test_slices_along_an_int_are_jointly_those_dims():
    grad = torch.tensor([[3.0, 0.0], [4.0, 0.5]])
    (u,) = once(ClipNorm(1.0, dim=0), grad)
    assert u.tolist() == [about([0.6, 0.0]), about([0.8, 0.5])]
    (u,) = once(ClipNorm(1.0, dim=1), grad)
    second = math.hypot(4, 0.5)
    assert u.tolist() == [about([1.0, 0.0]), about([4 / second, 0.5 / second])]


@pytest.mark.parametrize("dims", [(0, 2), (-3, -1), (0, 0, 2), [2, 0], (0, -1, 2, 7)])
def test_several_dims_count_from_either_end_once_each(dims):
    grad = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    (u,) = once(Normalize(1.0, dim=dims), grad)
    expected = grad / torch.linalg.vector_norm(grad, dim=(0, 2), keepdim=True)
    torch.testing.assert_close(u, expected)


def test_inverse_dims_are_all_the_others():
    grad = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for dim in (1, -2, (1,), (-2, 1)):
        (u,) = once(Normalize(1.0, dim=dim, inverse_dims=True), grad)
        torch.testing.assert_close(u, once(Normalize(1.0, dim=(0, 2)), grad)[0])


def test_dims_a_tensor_lacks_are_ignored_and_none_left_is_untouched():
    matrix, vector, scalar = once(
        Normalize(1.0, dim=1), torch.full((2, 4), 3.0), torch.full((4,), 3.0), torch.tensor(3.0)
    )
    torch.testing.assert_close(matrix, torch.full((2, 4), 0.5))
    assert vector.tolist() == [3.0] * 4
    assert scalar.item() == 3.0
    (vector,) = once(Normalize(1.0, dim=0, inverse_dims=True), torch.full((4,), 3.0))
    assert vector.tolist() == [3.0] * 4  # all dims except its only one: none left


def test_inverse_dims_without_dims_is_an_error():
    with pytest.raises(ValueError, match="ClipNorm: inverse_dims=True needs dim"):
        ClipNorm(1.0, inverse_dims=True)
    with pytest.raises(ValueError, match=r"Normalize: inverse_dims=True needs dim.*'global'"):
        Normalize(1.0, dim="global", inverse_dims=True)


def test_a_global_norm_is_one_measure_and_every_group_its_own_limit():
    bench = Bench(
        ClipNorm(1.0, dim="global"), 1, 1, 1, groups=[{}, {"max_norm": 0.5}, {"max_norm": 100.0}]
    )
    updates = bench([3.0], [4.0], [12.0])
    assert [u.item() for u in updates] == about([3 / 13, 4 * 0.5 / 13, 12.0])


def test_a_group_norm_is_one_measure_for_each_group():
    a, b, c = torch.zeros(3, 1).unbind()
    for p, value in ((a, 3.0), (b, 4.0), (c, 12.0)):
        p.grad = torch.tensor([value])
    Modular(
        [{"params": [a, b]}, {"params": [c], "max_norm": 2.0}], ClipNorm(1.0, dim="group")
    ).step()
    assert [-p.item() for p in (a, b, c)] == about([0.6, 0.8, 2.0])


def test_a_layer_is_what_shares_a_name_up_to_the_last_dot():
    names = ["net.0.weight", "net.1.weight", "net.0.bias", "scale"]
    updates = once(ClipNorm(1.0, dim="layer"), [3.0], [7.0], [4.0], [0.5], names=names)
    assert [u.item() for u in updates] == about([0.6, 1.0, 0.8, 0.5])


def test_layers_need_names():
    with pytest.raises(ValueError, match=r"dim='layer'.*model\.named_parameters\(\)"):
        Modular([torch.zeros(1, requires_grad=True)], ClipNorm(1.0, dim="layer"))


def test_a_spelling_for_global_and_a_dim_together_are_an_error():
    with pytest.raises(ValueError, match=r"parameterwise=False means dim='global'.*'group'"):
        ClipNormGrowth(parameterwise=False, dim="group")
    for rule in (ClipNormByEMA, NormalizeByEMA):
        with pytest.raises(ValueError, match=f"{rule.__name__}: tensorwise=False.*'group'"):
            rule(tensorwise=False, dim="group")


@pytest.mark.parametrize(
    ("spelt", "plain"),
    [
        (ClipNormGrowth(parameterwise=False), ClipNormGrowth(dim="global")),
        (ClipNormByEMA(tensorwise=False), ClipNormByEMA(dim="global")),
        (NormalizeByEMA(tensorwise=False), NormalizeByEMA(dim="global")),
    ],
    ids=["growth", "ema", "normalize"],
)
def test_the_old_spelling_is_the_global_scope(spelt, plain):
    a, b = Bench(spelt, 2, 3), Bench(plain, 2, 3)
    gen = torch.Generator().manual_seed(0)
    for _ in range(4):
        grads = [torch.randn(2, generator=gen) * 10, torch.randn(3, generator=gen)]
        for x, y in zip(a(*grads), b(*grads), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("rule", [ClipNormGrowth, ClipNormByEMA, NormalizeByEMA])
@pytest.mark.parametrize("dim", [0, (0, 1), -1])
def test_rules_with_memory_take_no_slices(rule, dim):
    with pytest.raises(ValueError, match=f"{rule.__name__}: dim must be None.*memory"):
        rule(dim=dim)


@pytest.mark.parametrize("make", [ClipNorm, Normalize, SoftClip])
def test_units_below_min_size_are_left_alone(make):
    small, large = once(make(1.0, min_size=3), [3.0, 4.0], [3.0, 4.0, 0.0])
    assert small.tolist() == [3.0, 4.0]
    assert large[2].item() == 0
    assert large[:2].tolist() != [3.0, 4.0]
    (u,) = once(make(1.0, dim=1, min_size=3), [[3.0, 4.0]])
    assert u.tolist() == [[3.0, 4.0]]
    pair = once(make(1.0, dim="global", min_size=3), [3.0], [4.0])
    assert [u.item() for u in pair] == [3.0, 4.0]
    three = once(make(1.0, dim="global", min_size=3), [3.0], [4.0, 0.0])
    assert three[0].item() < 1


def test_global_state_follows_the_first_group_and_limits_their_own():
    bench = Bench(ClipNormGrowth(dim="global"), 1, 1, groups=[{"mul": 2.0}, {"mul": 4.0}])
    first = bench([3.0], [4.0])
    assert [u.item() for u in first] == [3.0, 4.0]  # p = 5
    second = bench([30.0], [40.0])  # limits 10 and 20 of 50
    assert [u.item() for u in second] == about([6.0, 16.0])
    third = bench([300.0], [400.0])  # p is the norm after scaling, √(6² + 16²)
    p = math.hypot(6, 16)
    assert [u.item() for u in third] == about([300 * 2 * p / 500, 400 * 4 * p / 500])


def test_a_global_bound_over_two_dtypes_steps_once():
    a = torch.zeros(1, requires_grad=True)
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    opt = Modular([{"params": [a]}, {"params": [b]}], ClipNormGrowth(dim="global"))
    totals = []
    for x in (1.0, 10.0, 10.0, 10.0):
        a.data.zero_(), b.data.zero_()
        a.grad, b.grad = torch.tensor([0.6 * x]), torch.tensor([0.8 * x], dtype=torch.float64)
        opt.step()
        totals.append(math.hypot(a.item(), b.item()))
    assert totals == about([1, 1.5, 2.25, 3.375])


# --- §1 stateless rules


def test_clip_value_clamps_and_keeps_nan():
    (u,) = once(ClipValue(1.5), [-3.0, 1.0, nan, 2.0, -inf])
    assert u.tolist() == about([-1.5, 1.0, nan, 1.5, -1.5])


def test_clip_norm_3_4_to_1():
    assert once(ClipNorm(1.0), [3.0, 4.0])[0].tolist() == about([0.6, 0.8])


def test_clip_norm_over_two_tensors():
    a, b = once(ClipNorm(1.0, dim="global"), [3.0, 4.0], [0.3, 0.4])
    assert a.tolist() == pytest.approx([0.597022, 0.796029], abs=1e-6)
    assert b.tolist() == pytest.approx([0.059702, 0.079603], abs=1e-6)


def test_normalize_scales_up_as_well_as_down():
    assert once(Normalize(), [0.3, 0.4])[0].tolist() == about([0.6, 0.8])
    assert once(Normalize(10.0), [30.0, 40.0])[0].tolist() == about([6.0, 8.0])


def test_centralize_takes_the_mean_away():
    assert once(Centralize(), [[1.0, 2.0], [3.0, 6.0]])[0].tolist() == [[-2, -1], [0, 3]]
    assert once(Centralize(dim=1), [[1.0, 2.0], [3.0, 6.0]])[0].tolist() == [
        [-0.5, 0.5],
        [-1.5, 1.5],
    ]
    a, b = once(Centralize("global"), [1.0], [3.0, 8.0])
    assert (a.tolist(), b.tolist()) == ([-3.0], [-1.0, 4.0])


def test_centralize_leaves_units_of_one_element():
    assert once(Centralize(), [5.0])[0].tolist() == [5.0]
    assert once(Centralize(dim=1), [[5.0], [6.0]])[0].tolist() == [[5.0], [6.0]]
    assert once(Centralize(min_size=1), [5.0])[0].tolist() == [0.0]


def test_the_gradient_centralization_of_the_paper_is_dim_0_inverse_dims():
    conv = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    (u,) = once(Centralize(dim=0, inverse_dims=True), conv)
    torch.testing.assert_close(u, conv - conv.mean(dim=(1, 2, 3), keepdim=True))


def test_standardize_gives_mean_zero_and_unbiased_deviation_one():
    (u,) = once(Standardize(eps=0.0), torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64))
    expected = [(x - 3) / math.sqrt(7) for x in (1, 2, 6)]
    assert u.tolist() == about(expected, rel=1e-14)


def test_standardize_adds_eps_to_the_deviation():
    (u,) = once(Standardize(eps=1.0), [1.0, 2.0, 6.0])
    assert u.tolist() == about([(x - 3) / (math.sqrt(7) + 1) for x in (1, 2, 6)])


def test_standardize_leaves_one_element_and_zeroes_a_constant():
    assert once(Standardize(), [5.0])[0].tolist() == [5.0]
    assert once(Standardize(), [0.1] * 7)[0].tolist() == [0.0] * 7
    assert once(Standardize(), [1e8 + 1] * 1001)[0].tolist() == [0.0] * 1001
    assert once(Standardize(dim=1), [[0.1] * 3, [1.0, 2.0, 3.0]])[0].tolist() == [
        [0.0] * 3,
        about([-1.0, 0.0, 1.0], rel=1e-6),
    ]


def test_standardize_takes_two_passes():
    grad = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])  # Σx² - n·mean² has no digit left in float32
    assert once(Standardize(), grad)[0].tolist() == about([-1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("percentile", "bound"), [(0, 1), (50, 3), (90, 4), (99, 4), (100, 5), (24.9, 1), (25, 2)]
)
@pytest.mark.parametrize("dim", [None, "global"])
def test_clip_percentile_takes_the_order_statistic_below(percentile, bound, dim):
    grad = [1.0, -2.0, 3.0, -4.0, 5.0]
    (u,) = once(ClipPercentile(percentile, dim), grad)
    assert u.tolist() == [max(-bound, min(bound, x)) for x in grad]


def test_a_global_percentile_is_one_bound_for_all_tensors():
    a, b = once(ClipPercentile(50, "global"), [1.0, -2.0], [3.0, -4.0, 5.0])
    assert (a.tolist(), b.tolist()) == ([1.0, -2.0], [3.0, -3.0, 3.0])


def test_clip_rms_bounds_the_root_mean_square():
    (u,) = once(ClipRMS(1.0), [3.0, -4.0])
    assert u.tolist() == about([3 / math.sqrt(12.5), -4 / math.sqrt(12.5)])
    a, b = once(ClipRMS(1.0, "global"), [3.0], [4.0, 0.0, 0.0])
    assert (a.item(), b[0].item()) == about((3 / 2.5, 4 / 2.5))


def test_soft_clip_shrinks_by_one_over_one_plus_n_over_max():
    assert once(SoftClip(5.0), [3.0, 4.0])[0].tolist() == about([1.5, 2.0])
    assert once(SoftClip(1.0), [3.0, 4.0])[0].tolist() == about([0.5, 4 / 6])


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_soft_clip_never_exceeds_its_limit(size):
    u = once(SoftClip(2.0), torch.tensor([0.6 * size, 0.8 * size], dtype=torch.float64))[0]
    assert u.norm().item() == about(size / (1 + size / 2), rel=1e-12)
    assert u.norm().item() < 2.0


def test_sign_and_nan_to_num():
    assert once(Sign(), [-3.0, 0.0, 1e-30, inf])[0].tolist() == [-1, 0, 1, 1]
    assert once(NanToNum(), [nan, inf, -inf, 2.0])[0].tolist() == [0, 0, 0, 2]
    assert once(NanToNum(7.0, 8.0, 9.0), [nan, inf, -inf, 2.0])[0].tolist() == [7, 8, 9, 2]


# --- §2 growth


@pytest.mark.parametrize(
    ("inputs", "expected", "keys"),
    [
        ([1, 10, 10, 10, 10], [1, 1.5, 2.25, 3.375, 5.0625], {}),
        ([1, 0.1, 0.1, 0.1, 10], [1, 0.1, 0.1, 0.1, 0.1875], {}),
        ([0, 1, 10, 1], [0, 1, 1.5, 1], {}),
        ([1, 10, 10], [1, 2, 3], {"add": 1.0, "mul": None}),
        ([1e-5, 1e-3, 1e-3], [1e-5, 1.5e-4, 2.25e-4], {}),
        ([1, inf, 10], [1, nan, 1.5], {}),
        ([1, nan, 10], [1, nan, 1.5], {}),
        ([10, 100, 100], [10, 11, 12], {"add": 1.0}),  # the smaller of the two bounds
        ([1, 100, 100], [1, 1.5, 2.25], {"add": 50.0}),
        ([8, 1, 10], [8, 1, 6], {}),  # p = max(1, 8 / 2)
        ([8, 1, 10], [8, 1, 1.5], {"max_decay": None}),
        ([8, 1, 10], [8, 1, 12 * 10 / 12], {"max_decay": 1.0}),
        ([1e-6, 1.0], [1e-6, 1.5e-6], {"min_value": None}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_may_grow_by_so_much_a_step(inputs, expected, keys, dtype):
    assert sequence(ClipNormGrowth(**keys), inputs, dtype) == about(expected)


def test_min_value_does_not_halve_healthy_updates():
    assert sequence(ClipNormGrowth(min_value=10.0), [1, 1, 1]) == [1, 1, 1]


@pytest.mark.parametrize("rule", [ClipNormGrowth, ClipValueGrowth])
def test_growth_without_bounds_is_an_error(rule):
    with pytest.raises(ValueError, match=f"{rule.__name__}: give add or mul, got None for both"):
        rule(add=None, mul=None)


def test_an_entry_may_grow_by_so_much_a_step_and_keeps_its_sign():
    assert sequence(ClipValueGrowth(), [1, -10, 10]) == about([1, -1.5, 2.25])
    assert sequence(ClipValueGrowth(add=1.0, mul=None), [1, -10, 10]) == about([1, -2, 3])
    assert sequence(ClipValueGrowth(), [0, 5, -100]) == about([0, 5, -7.5])


def test_every_entry_has_a_bound_of_its_own():
    bench = Bench(ClipValueGrowth(), 2)
    bench([1.0, -0.1])
    assert bench([10.0, 10.0])[0].tolist() == about([1.5, 0.15])


# --- §3 averages


@pytest.mark.parametrize(
    ("inputs", "expected", "keys"),
    [
        ([1] * 5, [0.01, 0.015, 0.0225, 0.032275, 0.041952], {}),
        ([1, 1, 1, 100, 100], [0.5, 0.75, 0.875, 1.3125, 1.96875], {"beta": 0.5}),
        (
            [1, 1, 1, 100, 100],
            [0.5, 0.75, 0.875, 50.4375, 75.21875],
            {"beta": 0.5, "max_ema_growth": None},
        ),
        ([0, 1, 1, 1], [0, 0.01, 0.015, 0.0225], {}),
        (
            [1, -1, 1, -1],
            [0.1, -0.01, 0.091, -0.0181],
            {"beta": 0.9, "max_ema_growth": None},
        ),
        ([1, 1, inf, 1], [0.5, 0.75, nan, 0.875], {"beta": 0.5}),
        ([1, 1, nan, 1], [0.5, 0.75, nan, 0.875], {"beta": 0.5}),
        ([2, 4, 1], [2, 3, 1], {"beta": 0.5, "ema_init": "update"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clip_norm_by_ema(inputs, expected, keys, dtype):
    rel = 2e-5 if len(inputs) == 5 and not keys else 1e-6  # the first row is given to five digits
    assert sequence(ClipNormByEMA(**keys), inputs, dtype) == about(expected, rel=rel)


def test_normalize_by_ema_also_scales_up():
    assert sequence(NormalizeByEMA(0.5), [1, 1, 0.1, 1]) == about([0.5, 0.75, 0.425, 0.6375])


@pytest.mark.parametrize("rule", [ClipNormByEMA, NormalizeByEMA])
def test_eps_is_the_smallest_limit(rule):
    assert sequence(rule(0.5, eps=10.0), [100, 100]) == about([50, 75])
    assert sequence(rule(0.999, eps=2.0, max_ema_growth=None), [100, 100]) == about([2.0, 2.0])


def test_the_average_over_all_tensors_is_one_vector():
    bench = Bench(ClipNormByEMA(0.5, dim="global", max_ema_growth=None), 1, 1)
    first = bench([3.0], [4.0])
    assert [u.item() for u in first] == about([1.5, 2.0])  # ‖m‖ = 2.5 of 5
    second = bench([3.0], [-4.0])  # m = (2.25, -1)
    e = math.hypot(2.25, 1)
    assert [u.item() for u in second] == about([3 * e / 5, -4 * e / 5])


def test_clip_value_by_ema_bounds_every_entry_by_its_average():
    assert sequence(ClipValueByEMA(), [1, 1, 1]) == about([0.01, 0.0199, 0.029701])
    assert sequence(ClipValueByEMA(0.5), [1, -1, 100]) == about([0.5, -0.75, 50.375])
    assert sequence(ClipValueByEMA(0.5, "update"), [2, 4, -1]) == about([2, 3, -1])


@pytest.mark.parametrize("factor", [3.0, -3.0])
def test_the_bound_is_the_magnitude_of_what_ema_tfm_makes(factor):
    rule = ClipValueByEMA(0.5, ema_tfm=Scale(factor))
    assert sequence(rule, [1, -10, 1]) == about([1, -10, 1])  # 3 × .5, 3 × 5.25
    assert sequence(rule, [1, 1, -100]) == about([1, 1, -100])  # 3 × 50.375
    rule = ClipValueByEMA(0.5, ema_tfm=Scale(factor / 30))
    assert sequence(rule, [1, 1, -1]) == about([0.05, 0.075, -0.0875])


def test_ema_tfm_leaves_the_average_unharmed():
    bench = Bench(ClipValueByEMA(0.5, ema_tfm=Scale(100.0)), 1)
    bench([1.0]), bench([1.0])
    assert bench.opt.state[bench.params[0]]["ClipValueByEMA/ema"].tolist() == about([0.75])


def test_ema_tfm_may_be_a_chain_with_state():
    bench = Bench(ClipValueByEMA(0.0, ema_tfm=EMA(0.5)), 1)  # the bound is an average of |u|
    assert [bench([x])[0].item() for x in (1.0, -4.0)] == about([0.5, -2.25])


def test_links_inside_ema_tfm_may_not_rewrite_gradients():
    with pytest.raises(ValueError, match=r'ClipValueByEMA.*target="grad"'):
        ClipValueByEMA(ema_tfm=ClipNorm(1.0, target="grad"))


# --- §5 descent, beside what test_descent.py compares with torch.optim


def test_cautious_keeps_what_agrees_and_rescales_by_the_share_kept():
    bench = Bench((Momentum(0.9), Cautious()), 4)
    bench([10.0, 10.0, 10.0, 10.0])
    (u,) = bench([1.0, 1.0, -1.0, 0.0])  # the momentum is 10, 10, 8, 9
    assert u.tolist() == about([20.0, 20.0, 0.0, 0.0])


def test_cautious_divides_by_no_less_than_a_thousandth():
    grads = torch.full((4000,), -1.0)
    grads[0] = 1.0
    bench = Bench((Momentum(0.9), Cautious()), 4000)
    bench(torch.full((4000,), 10.0))
    assert bench(grads)[0][0].item() == about(10.0 * 1000)


def test_warmup_multiplies_by_t_over_steps():
    assert sequence(Warmup(4), [8] * 6) == about([2, 4, 6, 8, 8, 8])


def test_ema_with_and_without_debias():
    assert sequence(EMA(0.9), [1, 1, 3]) == about([0.1, 0.19, 0.471])
    assert sequence(EMA(0.9, debias=True), [1, 1, 3]) == about([1, 1, 0.471 / 0.271])


def test_ema_with_nesterov_looks_ahead():
    ahead = [0.1 * u + 0.9 * m for u, m in [(1, 0.1), (1, 0.19), (3, 0.471)]]
    assert sequence(EMA(0.9, nesterov=True), [1, 1, 3]) == about(ahead)


def test_lion_takes_the_sign_of_an_interpolation():
    bench = Bench(Lion((0.5, 0.9)), 1)
    assert [bench([x])[0].item() for x in (1.0, -0.05, -0.2)] == [1, 1, -1]
    # m = .1, then .085: 0.5·.1 - .5·.05 > 0, and 0.5·.085 - .5·.2 < 0


def test_weight_decay_before_adam_is_coupled_and_after_it_decoupled():
    for links, expected in (
        ((WeightDecay(0.5), Adam(eps=0.0), LR(0.1)), 2 - 0.1 * 1.0),  # the sign of g + w / 2
        ((Adam(eps=0.0), WeightDecay(0.5), LR(0.1)), 2 - 0.1 * (1.0 + 1.0)),
    ):
        p = torch.tensor([2.0], requires_grad=True)
        p.grad = torch.tensor([3.0])
        Modular([p], *links).step()
        assert p.item() == about(expected)


def test_scale_by_minus_one_goes_uphill():
    assert sequence((Scale(-1), LR(0.5)), [4.0]) == [-2.0]


def test_a_layer_keeps_its_state_when_its_first_parameter_joins_late():
    layer = torch.nn.Linear(1, 1)
    opt = Modular(layer.named_parameters(), ClipNormGrowth(dim="layer"), LR(0.0))
    for _ in range(3):
        layer.bias.grad = torch.ones(1)
        opt.step()
    layer.weight.grad = torch.full((1, 1), 100.0)
    opt.step()
    assert opt.metrics()["ClipNormGrowth/limit"].item() == 1.5


def test_a_double_tensor_is_standardized_by_its_own_precision():
    values = [1.0, 1.0 + 1e-8, 1.0 - 1e-8]
    alone, beside = (param(*values, dtype=torch.float64, grad=values) for _ in range(2))
    Modular([alone], Standardize(0.0), LR(1.0)).step()
    Modular([beside, param(1.0, 2.0, grad=[1.0, 2.0])], Standardize(0.0), LR(1.0)).step()
    assert torch.equal(alone, beside)
    assert not torch.equal(alone.detach(), torch.tensor(values, dtype=torch.float64))
