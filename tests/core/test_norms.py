"""Norms are right to 1e-6, float64 ones to 1e-12, whatever the size, range, dtype and layout."""

import math
import sys

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import at_once
from torchzero_clip import ClipNorm, Modular, Normalize
from torchzero_clip.core import norms
from torchzero_clip.core.norms import short_tensors, slices

inf, nan = math.inf, math.nan

ORDERS = [0, 0.5, 1, 1.5, 2, 3, 7, 20, inf, "l0", "l1", "l2", "l3", "l4", "linf"]
STATISTICS = ["mad", "rms", "std", "var", "sum"]
EVERY = [*ORDERS, *STATISTICS]
DISTINCT = [order for order in EVERY if order not in ("l0", "l1", "l2", "l3", "linf")]
REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12}


def reference(tensors, order):
    """The definition over all entries, in float64 and in a range that cannot overflow."""
    pairs = any(t.is_complex() for t in tensors)
    wide = torch.complex128 if pairs else torch.float64
    x = torch.cat([t.detach().reshape(-1).to(wide) for t in tensors])
    size = torch.hypot(x.real, x.imag) if pairs else x.abs()
    n = x.numel()
    powers = {"l0": 0, "l1": 1, "l2": 2, "l3": 3, "l4": 4, "linf": inf, "mad": 1, "rms": 2}
    p = powers.get(order, order)
    if order in ("std", "var"):
        if n < 2:
            return 0.0
        peak = size.max().item()
        if peak == 0 or not math.isfinite(peak):
            return 0.0 if peak == 0 else nan
        y = x / peak
        away = y - y.mean()
        var = (away.abs() ** 2).sum().item() / (n - 1)
        return math.sqrt(var) * peak if order == "std" else var * peak * peak
    if order == "sum":
        return abs(x.sum().item()) if n else 0.0
    if p == 0:
        return float((size != 0).sum())
    if n == 0:
        return 0.0
    if size.isnan().any():
        return nan
    peak = size.max().item()
    if p == inf or peak in (0, inf):
        return peak
    total = ((size / peak) ** p).sum().item()
    mean = n if order in ("mad", "rms") else 1
    return peak * (total / mean) ** (1 / p)


def measured(tensors, order):
    """What core.norms says of all the tensors together."""
    m = norms.measure(order)
    counts = torch.tensor([[t.numel() for t in tensors]], dtype=torch.float64)
    stats = norms.merge(norms.statistics(tensors, m).unsqueeze(1), counts, m)
    return norms.finish(stats, counts.sum(1), m)[0].item()


def sliced(x, dims, order):
    m = norms.measure(order)
    count = torch.tensor([math.prod([x.shape[d] for d in dims])], dtype=torch.float64)
    norm = norms.finish(slices.slice_statistics(x, dims, m), count, m)
    return norm.view([1 if d in dims else n for d, n in enumerate(x.shape)])


def random(shape, dtype=torch.float32, seed=0, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(shape, generator=gen, dtype=wide) * scale).to(dtype)


def close(expected, dtype=torch.float32):
    return pytest.approx(expected, rel=TOLERANCE.get(dtype, 1e-6), abs=0, nan_ok=True)


# --- one tensor


def test_a_name_means_the_number_in_it():
    names = {"l0": 0, "l1": 1, "l2": 2, "l3": 3, "l4": 4, "linf": inf}
    for name, order in names.items():
        assert norms.measure(name) == norms.measure(order)


@at_once("dtype", REAL)
@at_once("size", [1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 65536, 65537, 70_001])
@at_once("order", DISTINCT)
def test_every_order_at_sizes_around_every_switch(order, size, dtype):
    x = random(size, dtype) + (1 if order == "sum" else 0)  # a sum without cancellation
    assert measured([x], order) == close(reference([x], order), dtype)


@at_once(
    "order, dtype",
    [
        *[(x, torch.float32) for x in (1, 2, 3, inf, "mad", "rms", "std", "var", "sum", 0)],
        *[(x, dtype) for x in (1, 2, "std") for dtype in (torch.float16, torch.bfloat16)],
    ],
)
def test_a_million_entries(order, dtype):
    x = random(1_000_003, dtype) + (1 if order == "sum" else 0)
    assert measured([x], order) == close(reference([x], order), dtype)


@at_once("order", [1, 2, "std"])
def test_five_million_entries_far_from_zero(order):
    """A plain float32 sum of these stalls."""
    x = random(5_000_000) / 100 + 3
    assert measured([x], order) == close(reference([x], order))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2, inf, "std", "sum"])
def test_forty_million_entries(order):
    x = random(40_000_000) / 100 + 3
    assert measured([x], order) == close(reference([x], order))


@at_once("scale", [1e20, 1e18, 1e-18, 1e-20, 1e-30, 1e-36])
@at_once("size", [3, 300, 5000, 70_000])
@at_once("order", DISTINCT)
def test_values_at_the_ends_of_float32(order, size, scale):
    x = random(size, scale=scale) + (scale if order == "sum" else 0)
    assert measured([x], order) == close(reference([x], order))


@at_once("size", [3, 300, 5000, 70_000])
def test_a_sum_may_leave_float32_where_no_entry_does(size):
    x = torch.full((size,), 1e38)
    assert measured([x], "sum") == close(reference([x], "sum"))


@at_once("scale", [1e150, 1e200, 1e-150, 1e-200, 1e-300])
@at_once("size", [3, 5000])
@at_once("order", [o for o in EVERY if o != "var"])
def test_values_at_the_ends_of_float64(order, size, scale):
    x = random(size, torch.float64, scale=scale) + (scale if order == "sum" else 0)
    assert measured([x], order) == close(reference([x], order), torch.float64)


@at_once("dtype", [torch.float16, torch.bfloat16])
@at_once("order", EVERY)
def test_values_whose_squares_leave_half_precision(order, dtype):
    for value in (60000.0, 6e-5):
        x = torch.tensor([value, -value / 2, value / 3, value / 8], dtype=dtype)
        assert measured([x], order) == close(reference([x], order))


@at_once("dtype, tiny", [(torch.float32, 1e-42), (torch.float64, 1e-320)])
@at_once("size", [5, 5000])
@at_once("order", [0, 1, 2, 3, inf, "mad", "rms", "sum"])
def test_denormal_values(order, size, dtype, tiny):
    x = torch.full((size,), tiny, dtype=dtype)
    # the last digit of a float64 denormal is worth 5e-4 of 1e-320
    rel = 1e-3 if dtype == torch.float64 and order in ("mad", "rms") else 1e-6
    assert measured([x], order) == pytest.approx(reference([x], order), rel=rel, abs=0)


@at_once("size", [2, 300, 5000])
@at_once("order", [0.5, 1, 2, 3, 7, inf, "mad", "rms", "sum", "std", "var"])
def test_a_nan_is_a_nan_wherever_it_stands(order, size):
    for place in (0, size // 2, size - 1):
        x = random(size)
        x[place] = nan
        assert math.isnan(measured([x], order))
        assert math.isnan(measured([x, random(3)], order))
        x[0] = inf
        x[place] = nan
        assert math.isnan(measured([random(3), x], order))


@at_once("size", [2, 300, 5000])
@at_once("order", [0.5, 1, 2, 3, 7, inf, "mad", "rms", "sum"])
def test_an_infinity_is_infinite(order, size):
    for value in (inf, -inf):
        x = random(size)
        x[size // 2] = value
        assert measured([x], order) == inf
        assert measured([random(3), x], order) == inf


@at_once("order", EVERY)
def test_an_empty_tensor_and_a_zero_tensor_measure_zero(order):
    assert measured([torch.zeros(0)], order) == 0
    assert measured([torch.zeros(0, 3)], order) == 0
    assert measured([torch.zeros(5000)], order) == 0
    assert measured([torch.zeros(3), torch.zeros(0)], order) == 0


@at_once("order", EVERY)
def test_an_empty_tensor_beside_another_does_not_count(order):
    x = random(7)
    for tensors in ([torch.zeros(0), x], [x, torch.zeros(0, 4)]):
        assert measured(tensors, order) == close(reference([x], order))


@at_once("order", EVERY)
def test_a_0_dim_tensor_is_one_entry(order):
    x = torch.tensor(-3.0)
    assert measured([x], order) == close(reference([x], order))


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::3],
    "expanded": lambda x: x[:1].expand(40, -1),
    "channels last": lambda x: x.view(10, 20, 30, -1).to(memory_format=torch.channels_last),
    "offset": lambda x: x.flatten()[1:],
    "negated view": lambda x: torch.complex(x, x).conj().imag,
}


@at_once(
    "layout, dtype",
    [
        (layout, dtype)
        for layout in LAYOUTS
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
        if (layout, dtype) != ("negated view", torch.bfloat16)  # torch has no complex bfloat16
    ],
)
@at_once("order", DISTINCT)
def test_memory_layout_does_not_matter(order, layout, dtype):
    x = LAYOUTS[layout](random((200, 300), dtype) + (1 if order == "sum" else 0))
    assert measured([x], order) == close(reference([x], order), dtype)


@at_once("dtype", [torch.complex64, torch.complex128])
@at_once("size", [1, 2, 300, 5000, 70_000])
@at_once("order", EVERY)
def test_complex_entries_count_with_their_modulus(order, size, dtype):
    x = random(size, dtype) + (1 if order == "sum" else 0)
    assert measured([x], order) == close(reference([x], order), dtype)


@at_once("order", [1, 2, 3, inf, "rms"])
def test_complex_entries_whose_squares_overflow(order):
    for scale in (1e20, 1e-30):
        x = random(5000, torch.complex64, scale=scale)
        assert measured([x], order) == close(reference([x], order))


@at_once("order", ["l5", "median", "", -1, -0.5, nan, True, None, (2,)])
def test_an_unknown_order_is_an_error_with_the_choices(order):
    with pytest.raises(ValueError, match=r"number of at least 0, inf, .*'l2'.*'std'.*got "):
        norms.measure(order)
    with pytest.raises(ValueError, match=r"ClipNorm: ord must be.*'l2'"):
        ClipNorm(1.0, order)


# --- several tensors


SHAPES = {
    "small": [(3,), (2, 5), (), (0, 2), (1,)],
    "mixed": [(70_000,), (3,), (4097,), (50, 100), ()],
    "ones": [(1,)] * 9,
}


@at_once("shapes", SHAPES)
@at_once("dtype", [*REAL, torch.complex64])
@at_once("order", EVERY)
def test_tensors_together_measure_what_their_concatenation_does(order, dtype, shapes):
    tensors = [random(s, dtype, i, 10.0**i) + i for i, s in enumerate(SHAPES[shapes])]
    if dtype == torch.float16:
        tensors = [random(s, dtype, i) + i for i, s in enumerate(SHAPES[shapes])]
    assert measured(tensors, order) == close(reference(tensors, order), dtype)


@at_once("order", ["std", "var"])
def test_spread_combines_means_that_lie_far_apart(order):
    tensors = [random(1000, seed=i) + 1000 * i for i in range(5)]
    assert measured(tensors, order) == close(reference(tensors, order))


@at_once("order", ["std", "var"])
def test_spread_of_what_is_far_from_zero_and_close_together(order):
    """Σx² − n·mean² has no digits left."""
    tensors = [random(500, torch.float64, i) * 1e-3 + 1e5 for i in range(3)]
    expected = torch.cat(tensors).std().item()
    expected = expected if order == "std" else expected**2
    assert measured(tensors, order) == pytest.approx(expected, rel=1e-9)


@at_once("order", [1, 2, 3, "rms"])
def test_a_huge_tensor_beside_a_tiny_one(order):
    tensors = [random(5, scale=1e30), random(5, scale=1e-30)]
    assert measured(tensors, order) == close(reference(tensors, order))


@at_once("scale", [1e25, 1e-30])
@at_once("order", [1, 2, 3, 7])
def test_tensors_whose_powers_leave_the_range_combine(order, scale):
    tensors = [random(5, scale=scale, seed=i) for i in range(3)]
    assert measured(tensors, order) == close(reference(tensors, order))


def units(scope, order, grads, groups=None, names=None):
    """The measure of every unit, read from what Normalize does to one entry of each tensor."""
    params = [torch.zeros_like(g, requires_grad=True) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    given = params if names is None else list(zip(names, params, strict=True))
    if groups is not None:
        given = [{"params": [given[i] for i in row]} for row in groups]
    Modular(given, Normalize(1.0, order, scope)).step()
    ratios = []
    for p, g in zip(params, grads, strict=True):
        at = g.abs().flatten().argmax()
        ratios.append((g.flatten()[at] / -p.detach().flatten()[at]).item())
    return ratios


@at_once("order", [0.5, 1, 2, 3, inf, "mad", "rms", "std", "sum"])
def test_every_scope_measures_the_concatenation_of_its_tensors(order):
    shapes = [(4, 5), (5000,), (3,), (2, 2, 2), (70,)]
    grads = [random(s, torch.float64, i) + i for i, s in enumerate(shapes)]
    names = ["a.w", "b.w", "a.b", "b.b", "c"]
    groups = [[0, 3], [1, 2, 4]]
    together = {
        None: [[0], [1], [2], [3], [4]],
        "layer": [[0, 2], [1, 3], [4]],
        "group": groups,
        "global": [[0, 1, 2, 3, 4]],
    }
    for scope, partition in together.items():
        ratios = units(scope, order, grads, groups, names)
        for row in partition:
            expected = reference([grads[i] for i in row], order)
            for i in row:
                assert ratios[i] == close(expected, torch.float64)


# --- slices


@at_once("dtype", [*REAL, torch.complex64])
@at_once("dims", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@at_once("order", DISTINCT)
def test_slices_measure_what_each_slice_alone_does(order, dims, dtype):
    x = random((3, 4, 5), dtype) + (1 if order == "sum" else 0)
    out = sliced(x, dims, order)
    assert out.shape == tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    rest = [d for d in range(3) if d not in dims]
    rows = x.permute(*rest, *dims).reshape(-1, math.prod(x.shape[d] for d in dims))
    expected = [reference([row], order) for row in rows]
    assert out.flatten().tolist() == close(expected, dtype)


@at_once("scale", [1e20, 1e-30, 1e-42])
@at_once("order", [0.5, 1, 2, 3, 7, inf, "mad", "rms", "sum"])
def test_slices_at_the_ends_of_float32(order, scale):
    x = random((4, 300), scale=scale) + (scale if order == "sum" else 0)
    expected = [reference([row], order) for row in x]
    assert sliced(x, (1,), order).flatten().tolist() == close(expected)


@at_once("scale", [1e160, 1e-160, 1e-300])
@at_once("order", [1, 2, 3, 7, inf, "mad", "rms", "std"])
def test_slices_at_the_ends_of_float64(order, scale):
    x = random((4, 30), torch.float64, scale=scale)
    expected = [reference([row], order) for row in x]
    assert sliced(x, (1,), order).flatten().tolist() == close(expected, torch.float64)


@at_once("order", [1, 2, inf, "mad"])
def test_long_slices_are_as_exact_as_short_ones(order):
    x = random((2, 1_000_000)) / 100 + 3
    expected = [reference([row], order) for row in x]
    assert sliced(x, (1,), order).flatten().tolist() == close(expected)


@at_once("order", EVERY)
def test_slices_of_nothing_measure_zero(order):
    assert sliced(torch.zeros(3, 0), (1,), order).tolist() == [[0], [0], [0]]
    assert sliced(torch.zeros(0, 3), (1,), order).shape == (0, 1)


# --- properties


entries = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12)
orders = st.sampled_from([0.5, 1, 1.5, 2, 3, 7, inf, "mad", "rms", "l4"])


@given(entries, orders)
def test_a_norm_is_that_of_the_definition(xs, order):
    x = torch.tensor(xs)
    assert measured([x], order) == close(reference([x], order))


@given(entries, orders, st.integers(0, 12))
def test_cutting_a_tensor_in_two_does_not_change_its_measure(xs, order, cut):
    x = torch.tensor(xs, dtype=torch.float64)
    whole = measured([x], order)
    assert measured([x[:cut], x[cut:]], order) == pytest.approx(whole, rel=1e-12, abs=1e-300)


@given(entries, st.sampled_from(["std", "var", "sum"]), st.integers(0, 12))
def test_cutting_does_not_change_spread_or_sum_either(xs, order, cut):
    x = torch.tensor(xs, dtype=torch.float64)
    size = x.abs().max().item()
    slack = size * size if order == "var" else size
    whole = measured([x], order)
    assert measured([x[:cut], x[cut:]], order) == pytest.approx(whole, rel=1e-12, abs=1e-11 * slack)


@given(entries, orders, st.integers(-60, 60))
def test_a_norm_scales_with_its_tensor(xs, order, exponent):
    x, scale = torch.tensor(xs, dtype=torch.float64), 2.0**exponent
    expected = scale * measured([x], order)
    assert measured([x * scale], order) == pytest.approx(expected, rel=1e-12, abs=0)


@given(entries, orders, st.randoms(use_true_random=False))
def test_a_norm_does_not_depend_on_the_order_of_entries(xs, order, random_):
    mixed = list(xs)
    random_.shuffle(mixed)
    a, b = torch.tensor(xs), torch.tensor(mixed)
    assert measured([a], order) == pytest.approx(measured([b], order), rel=1e-12)


@given(entries, entries, st.sampled_from([1, 1.5, 2, 3, 7, inf]))
def test_the_triangle_inequality_holds(xs, ys, order):
    n = min(len(xs), len(ys))
    a, b = torch.tensor(xs[:n]).double(), torch.tensor(ys[:n]).double()
    assert measured([a + b], order) <= (measured([a], order) + measured([b], order)) * (1 + 1e-12)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=2, max_size=8),
    orders,
)
def test_no_finite_float32_tensor_has_an_infinite_or_vanishing_norm(xs, order):
    x = torch.tensor(xs)
    assume(x.abs().max() > 0)
    assert measured([x], order) == close(reference([x], order))
    assert 0 < measured([x], order) < inf


@given(entries)
def test_the_measure_of_an_operand_is_not_changed_by_measuring_it(xs):
    x = torch.tensor(xs)
    before: Tensor = x.clone()
    for order in EVERY:
        measured([x], order)
        sliced(x, (0,), order)
    assert torch.equal(x, before)


# ---------------------------------------------------------------------- large tensors, in blocks


@at_once("order", DISTINCT)
@at_once("dims", [(0,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_slices_of_a_large_tensor_are_measured_in_blocks(order, dims, monkeypatch):
    monkeypatch.setattr(slices, "PIECE", 2**16)
    x = torch.randn(70, 40, 25, generator=torch.Generator().manual_seed(0)) + 0.5
    x[3, 4, 5], x[65, 1] = 1e15, 0.0
    m = norms.measure(order)
    at_once = slices._slice_statistics(x.double(), dims, m)
    stats = slices.slice_statistics(x, dims, m)
    assert stats.shape == at_once.shape
    torch.testing.assert_close(stats, at_once, rtol=1e-6, atol=1e-6 * at_once.abs().max().item())
    sizes = torch.tensor(float(math.prod(x.shape[d] for d in dims)))
    a, b = norms.finish(stats, sizes, m), norms.finish(at_once, sizes, m)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0 if order != "sum" else 1e-6 * b.max().item())


def test_blocks_of_a_tensor_whose_first_dim_is_one():
    x = torch.randn(1, 1_000_000)
    for dims in ((0,), (1,), (0, 1)):
        torch.testing.assert_close(
            slices.slice_statistics(x, dims, norms.measure(2)),
            torch.linalg.vector_norm(x.double(), 2, dims).view(1, -1),
        )


@at_once("dtype", REAL)
@at_once("p", [0.0, 12.5, 50.0, 99.9, 100.0])
def test_percentiles_of_many_numbers_are_counted(dtype, p, monkeypatch):
    module = sys.modules[norms.percentile.__module__]
    monkeypatch.setattr(module, "PIECE", 2**16)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (70_000, 3, 0, 4_000)]
    tensors[0][:100] = 0.0
    tensors[3][:9] = torch.tensor([inf, -inf, inf, 1e-40, -1e-40, 60000.0, -0.0, 1.0, -1.0])
    sizes = torch.cat(tensors).abs()
    expected = sizes.kthvalue(int(p * (sizes.numel() - 1) / 100) + 1).values
    found = norms.percentile([t.view(-1, 1) for t in tensors], p)
    assert found.double() == expected.double()
    assert (
        norms.percentile(tensors, torch.tensor(p, dtype=torch.float64)).double()
        == expected.double()
    )


def test_nan_is_the_largest_of_all_percentiles():
    x = torch.randn(900_000)
    x[5], x[7] = nan, inf
    assert norms.percentile([x], 100.0).isnan()
    assert norms.percentile([x[6:]], 100.0) == inf
    assert norms.percentile([x, x.double()], 50.0).dtype == torch.float64
    assert norms.percentile([x[:0]], 50.0) == 0


BESIDE = [(1,), (7,), (192,), (256,), (300,), (768,), (32, 32), (64, 64), (65, 64), (128, 256)]


@at_once("order", [1, 2, 3, "linf", "l0", "mad", "std", "var", "sum"])
@at_once("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_has_the_same_bits_whatever_is_measured_beside_it(order, dtype):
    """Alone, with many of its shape, with large ones, and with some that leave the range."""
    generator, m = torch.Generator().manual_seed(0), norms.measure(order)
    drawn = [torch.randn(shape, generator=generator) for shape in BESIDE for _ in range(17)]
    drawn += [*[t.t() for t in drawn if t.dim() > 1][:3], torch.randn(300, 300)]
    tensors = [t.mul(10.0 ** -(i % 40)).to(dtype) for i, t in enumerate(drawn)]
    together = norms.statistics(tensors, m)
    alone = torch.cat([norms.statistics([t], m) for t in tensors], dim=1)
    assert together.equal(alone)


@at_once("order", [1, 2, "linf", "mad", "sum"])
@at_once("shapes", [[(64, 64)], [(64,)], [(3, 50), (64, 64), (), (65, 64)]])
def test_more_short_tensors_than_are_copied_at_a_time(order, shapes, monkeypatch):
    """Each batch lies in the memory of the one before, which must be measured by then."""
    monkeypatch.setattr(short_tensors, "SCRATCH_SIZE", 2**14)
    monkeypatch.setattr(short_tensors, "PACKINGS", short_tensors.Packings())
    tensors = [random(shapes[i % len(shapes)], seed=i) * (1 + i) for i in range(300)]
    m = norms.measure(order)
    alone = torch.cat([norms.statistics([t], m) for t in tensors], dim=1)
    assert norms.statistics(tensors, m).equal(alone)


@pytest.mark.parametrize("order", [1, 2, "linf", "sum"])
def test_the_default_device_does_not_matter(order, monkeypatch):
    monkeypatch.setattr(short_tensors, "PACKINGS", short_tensors.Packings())
    tensors, m = (
        [random(shape) for shape in [(3, 50), (70, 70), (700, 700), ()]],
        norms.measure(order),
    )
    with torch.device("meta"):
        there = norms.statistics(tensors, m)
    with torch.inference_mode():
        inside = norms.statistics(tensors, m)
    assert there.equal(norms.statistics(tensors, m))
    assert there.equal(inside)
