"""The rules as plain functions: numbers worked out by hand, and promised properties."""

import ast
import math
import random
import statistics
import sys
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import package_sizes
from tests.helpers import about, at_once
from torchzero_clip import spec

inf, nan = math.inf, math.nan

ORDERS = [0, 0.5, 1, 2, 3.5, inf, "l0", "l1", "l2", "l3", "l4", "linf", "mad", "std", "var", "sum"]
LINEAR_ORDERS = [o for o in ORDERS if o not in (0, "l0", "var")]

floats = st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-9)
vectors = st.lists(floats, max_size=6)
fractions = st.fractions(-100, 100, max_denominator=1000)
fraction_vectors = st.lists(fractions, max_size=6)
limits = st.floats(1e-6, 1e6)
fraction_limits = st.fractions(Fraction(1, 100), 100, max_denominator=1000)
orders = st.sampled_from(ORDERS)
powers_of_two = st.integers(-20, 20).map(lambda k: 2.0**k)


def outputs(rule, norms, state, **hyperparameters):
    return spec.run(rule, norms, state, **hyperparameters)[0]


def one_entry(rule, inputs, state, **hyperparameters):
    """The rule on vectors of one entry, as plain numbers."""
    return [y for (y,) in outputs(rule, [[x] for x in inputs], state, **hyperparameters)]


def warmed(rule, norms, start, steps, limit, **hyperparameters):
    """The rule behind a warm-up: every output and the last state."""
    return spec.run(
        spec.adaptive_clip,
        norms,
        spec.WarmUp(),
        rule=lambda n, state: rule(n, state, **hyperparameters),
        start=start,
        warmup_steps=steps,
        warmup_norm=limit,
    )


def upper_root(q):
    """√q rounded up, as a Fraction."""
    scale = 10**20
    return Fraction(math.isqrt(q.numerator * scale**2 // q.denominator) + 1, scale)


def no_root(_):
    raise AssertionError("a root was taken where nothing is clipped")


# --- the files

FILES = [path for path in package_sizes.files("spec") if path.name != "__init__.py"]


@at_once("path", FILES)
def test_only_the_standard_library_is_imported(path):
    found = {
        name for name in package_sizes.imports_of(path) if not name.startswith(f"{spec.__name__}.")
    }
    assert {name.split(".")[0] for name in found} <= set(sys.stdlib_module_names)


@at_once("path", FILES)
def test_every_function_says_what_it_computes(path):
    nodes = ast.parse(path.read_text()).body
    assert all(ast.get_docstring(f) for f in nodes if isinstance(f, ast.FunctionDef))


# --- norms


@pytest.mark.parametrize(
    ("ord", "expected"),
    [
        (0, 3),
        ("l0", 3),
        (0.5, (1 + math.sqrt(2) + 2) ** 2),
        (1, 7),
        ("l1", 7),
        (2, math.sqrt(21)),
        ("l2", math.sqrt(21)),
        ("l3", 73 ** (1 / 3)),
        ("l4", 273**0.25),
        (inf, 4),
        ("linf", 4),
        ("mad", 7 / 4),
        ("sum", 3),
        ("var", 6.25),
        ("std", 2.5),
    ],
)
def test_every_order_measures_what_its_name_says(ord, expected):
    assert spec.norm([1, -2, 4, 0], ord) == about(expected, rel=1e-15)


@pytest.mark.parametrize("ord", ["l5", "median", -1, nan])
def test_an_unknown_order_is_an_error_that_names_the_known_ones(ord):
    with pytest.raises(ValueError, match=r"ord must be .* one of l0, .* sum, got"):
        spec.norm([1], ord)


@given(vectors, orders)
def test_a_norm_does_not_depend_on_the_order_of_entries(xs, ord):
    assert spec.norm(xs[::-1], ord) == about(spec.norm(xs, ord), rel=1e-9, abs=1e-6)


@given(vectors, st.sampled_from(LINEAR_ORDERS), powers_of_two)
def test_a_norm_scales_with_its_vector(xs, ord, scale):
    assert spec.norm([x * scale for x in xs], ord) == spec.norm(xs, ord) * scale


@given(vectors, powers_of_two)
def test_variance_scales_with_the_square_and_l0_not_at_all(xs, scale):
    scaled = [x * scale for x in xs]
    assert spec.norm(scaled, "var") == spec.norm(xs, "var") * scale**2
    assert spec.norm(scaled, "l0") == spec.norm(xs, "l0")


@given(vectors)
def test_the_norm_agrees_with_hypot(xs):
    assert spec.norm(xs) == about(math.hypot(*xs), rel=1e-14)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-30, 1e20, 1e200])
def test_no_size_of_entries_overflows_or_vanishes(size):
    xs, tolerance = [3 * size, 4 * size], 1e-14 if size > 1e-300 else 1e-3
    assert spec.norm(xs) == about(5 * size, rel=tolerance)
    assert spec.clip_norm(xs, size) == about([0.6 * size, 0.8 * size], rel=tolerance)
    assert spec.normalize(xs) == about([0.6, 0.8], rel=tolerance)


@pytest.mark.parametrize("ord", ORDERS)
def test_the_norm_of_nothing_and_of_zeros_is_zero(ord):
    assert spec.norm([], ord) == 0
    assert spec.norm([0.0, 0.0], ord) == 0


def test_one_entry_has_no_spread():
    assert spec.norm([5.0], "std") == spec.norm([5.0], "var") == 0
    assert spec.clip_by([5.0], 1, "std") == spec.normalize([5.0], 1, "var") == [5.0]


def test_equal_entries_have_no_spread_in_spite_of_rounding():
    assert spec.norm([0.1] * 3, "std") == spec.norm([0.1] * 7, "var") == 0


@given(fraction_vectors)
def test_norms_without_a_root_are_exact_for_fractions(xs):
    assert spec.norm(xs, 1) == sum(abs(x) for x in xs)
    assert spec.norm(xs, "sum") == abs(sum(xs))
    assert spec.norm(xs, inf) == max((abs(x) for x in xs), default=0)
    if xs:
        assert spec.norm(xs, "mad") * len(xs) == spec.norm(xs, "l1")


# --- clip_norm, clip_by, normalize


def test_clip_norm_gives_the_direction_the_norm_of_the_limit():
    assert spec.clip_norm([3, 4], 1) == [0.6, 0.8]


def test_a_global_norm_is_the_norm_of_all_entries():
    clipped = spec.clip_norm([3, 4, 0.3, 0.4], 1)
    assert clipped == about([0.597022, 0.796029, 0.059702, 0.079603], rel=1e-5)


def test_only_the_magnitude_of_max_norm_counts():
    assert spec.clip_norm([3, 4], -1) == spec.clip_norm([3, 4], 1)
    assert spec.clip_norm([3, 4], -5) == [3, 4]


@given(fraction_limits, st.fractions(Fraction(1, 10**40), 1))
def test_clip_norm_decides_exactly(size, excess):
    xs = [3 * size, -4 * size]
    assert spec.clip_norm(xs, 5 * size, sqrt=no_root) == xs
    assert spec.clip_norm(xs, 5 * size * (1 + excess), sqrt=no_root) == xs
    assert spec.clip_norm(xs, 5 * size * (1 - excess / 2), sqrt=upper_root) != xs


@given(fraction_vectors, fraction_limits)
def test_clip_norm_never_exceeds_the_limit_when_the_root_is_rounded_up(xs, limit):
    clipped = spec.clip_norm(xs, limit, sqrt=upper_root)
    assert all(isinstance(x, Fraction) for x in clipped)
    assert sum(x * x for x in clipped) <= limit * limit


@given(vectors, limits)
def test_clip_norm_never_exceeds_the_limit_beyond_rounding(xs, limit):
    clipped = spec.clip_norm(xs, limit)
    assert math.hypot(*clipped) <= limit * (1 + 1e-14)
    assert all(
        abs(c) <= abs(x) * (1 + 1e-14) and c * x >= 0 for c, x in zip(clipped, xs, strict=True)
    )


@given(vectors, limits, orders)
def test_clipping_twice_is_clipping_once(xs, limit, ord):
    if ord in (0, "l0"):
        return
    once = spec.clip_by(xs, limit, ord)
    assert spec.clip_by(once, limit, ord) == about(once, rel=1e-9, abs=1e-9)
    once = spec.clip_norm(xs, limit)
    assert spec.clip_norm(once, limit) == about(once, rel=1e-14)


@given(fraction_vectors, fraction_limits, st.sampled_from([1, inf, "l1", "linf", "mad", "sum"]))
def test_clip_by_is_exact_and_idempotent_for_fractions(xs, limit, ord):
    once = spec.clip_by(xs, limit, ord)
    assert spec.norm(once, ord) == min(spec.norm(xs, ord), limit)
    assert spec.clip_by(once, limit, ord) == once


@given(vectors, limits, orders)
def test_a_vector_within_its_limit_comes_back_as_it_is(xs, slack, ord):
    enough = spec.norm(xs, ord)
    assert spec.clip_by(xs, enough, ord) == xs
    assert spec.clip_by(xs, enough + slack, ord) == xs
    assert spec.normalize(xs, enough, ord) == xs
    assert spec.clip_rms(xs, spec.norm(xs) / math.sqrt(len(xs)) if xs else 0) == xs
    assert spec.agc(xs, [1.0], max(spec.norm(xs), 1e-6)) == xs


@given(st.lists(st.floats(-1e3, 1e3, width=16), min_size=2, max_size=6), limits)
def test_after_normalizing_the_measure_is_the_limit_also_for_var(xs, limit):
    for ord in ("var", "std", 2, 3.5, "mad"):
        if spec.norm(xs, ord) > 0:
            assert spec.norm(spec.normalize(xs, limit, ord), ord) == about(limit, rel=1e-9)


def test_the_factor_of_var_is_a_square_root():
    assert spec.clip_by([1, -1], 0.5, "var") == about([0.5, -0.5])


def test_the_factor_of_l0_is_limit_over_count():
    assert spec.clip_by([3.0, 0.0, -5.0, 7.0], 1, "l0") == about([1.0, 0.0, -5 / 3, 7 / 3])
    assert spec.clip_by([3.0, 0.0], 1, "l0") == [3.0, 0.0]


@given(vectors, limits, powers_of_two)
def test_clipping_commutes_with_a_change_of_units(xs, limit, scale):
    scaled = [x * scale for x in xs]
    for rule in (spec.clip_norm, spec.clip_by, spec.clip_rms, spec.soft_clip):
        assert rule(scaled, limit * scale) == [x * scale for x in rule(xs, limit)]


@given(vectors, limits, powers_of_two)
def test_normalizing_forgets_the_scale(xs, limit, scale):
    assert spec.normalize([x * scale for x in xs], limit) == about(
        spec.normalize(xs, limit), rel=1e-14
    )


@given(
    st.lists(floats, min_size=1, max_size=6).flatmap(
        lambda xs: st.tuples(st.just(xs), st.permutations(range(len(xs))))
    ),
    limits,
)
def test_reordering_the_entries_reorders_the_result(drawn, limit):
    xs, order = drawn
    reordered = [xs[i] for i in order]
    for rule in (spec.clip_norm, spec.clip_rms, spec.soft_clip, spec.normalize):
        expected = rule(xs, limit)
        assert rule(reordered, limit) == about([expected[i] for i in order], rel=1e-12)
    expected = spec.clip_percentile(xs, 70)
    assert spec.clip_percentile(reordered, 70) == [expected[i] for i in order]


def test_clip_norm_keeps_decimals_decimal():
    clipped = spec.clip_norm([Decimal(3), Decimal(4)], Decimal(1), sqrt=Decimal.sqrt)
    assert clipped == [Decimal("0.6"), Decimal("0.8")]
    assert spec.norm([Decimal(3), Decimal(4)]) == Decimal(5)
    assert spec.clip_by([Decimal(3), Decimal(-4)], Decimal(2), inf) == [Decimal("1.5"), -2]


# --- the other rules without state


@given(vectors, limits, limits)
def test_clip_value_moves_only_what_lies_outside(xs, low, high):
    clipped = spec.clip_value(xs, -low, high)
    assert all(-low <= c <= high for c in clipped)
    assert all(c == x for c, x in zip(clipped, xs, strict=True) if -low <= x <= high)
    assert spec.clip_value(clipped, -low, high) == clipped


def test_clip_value_takes_both_bounds_and_keeps_nan():
    assert spec.clip_value([-3, 0, Fraction(1, 2), inf, nan], -1, 2) == about([-1, 0, 0.5, 2, nan])


@pytest.mark.parametrize(
    ("percentile", "expected"),
    [
        (0, [1, -1, 1, -1, 1]),
        (50, [1, -2, 3, -3, 3]),
        (90, [1, -2, 3, -4, 4]),
        (99, [1, -2, 3, -4, 4]),
        (100, [1, -2, 3, -4, 5]),
    ],
)
def test_clip_percentile_takes_the_order_statistic_below(percentile, expected):
    assert spec.clip_percentile([1, -2, 3, -4, 5], percentile) == expected


@given(st.lists(fractions | floats, max_size=9), st.floats(0, 100))
def test_clip_percentile_is_idempotent_and_bounded_by_an_entry(xs, percentile):
    clipped = spec.clip_percentile(xs, percentile)
    assert spec.clip_percentile(clipped, percentile) == clipped
    assert {abs(c) for c in clipped} <= {abs(x) for x in xs}


@given(st.lists(fractions, min_size=1, max_size=9))
def test_clip_percentile_at_0_and_100_is_the_least_size_and_the_identity(xs):
    assert {abs(c) for c in spec.clip_percentile(xs, 0)} == {min(abs(x) for x in xs)}
    assert spec.clip_percentile(xs, 100) == xs


def test_clip_percentile_sorts_nan_last():
    assert spec.clip_percentile([nan, 5, 1], 50) == about([nan, 5, 1])
    assert spec.clip_percentile([nan, 5, 1], 0) == about([nan, 1, 1])
    assert spec.clip_percentile([nan, 5, 1], 100) == about([nan, nan, nan])


@given(fraction_vectors)
def test_centralize_gives_mean_zero_exactly_and_twice_is_once(xs):
    centred = spec.centralize(xs)
    assert centred == (xs if len(xs) == 1 else spec.centralize(centred))
    assert len(xs) == 1 or sum(centred) == 0


def test_standardize_gives_mean_zero_and_unbiased_deviation_one():
    assert spec.standardize([1, 2, 3]) == about([-1, 0, 1], abs=1e-7)
    assert spec.standardize([1, 2, 3], eps=1) == [-0.5, 0, 0.5]
    assert spec.standardize([0, 2]) == about([-math.sqrt(0.5), math.sqrt(0.5)])
    xs = spec.standardize([5.0, -1.0, 2.5, 7.0])
    assert statistics.mean(xs) == about(0, abs=1e-12)
    assert statistics.stdev(xs) == about(1)


def test_standardize_leaves_one_entry_and_zeroes_a_constant():
    assert spec.standardize([5]) == [5]
    assert spec.standardize([0.1, 0.1, 0.1]) == [0, 0, 0]
    assert spec.standardize([1, 1 + 2.0**-52, 1]) == [0, 0, 0]
    assert spec.standardize([-1024.0, -1024 - 2.0**-42]) == [0, 0]
    assert spec.standardize([1, 1 + 2.0**-23, 1], ulp=2.0**-23) == [0, 0, 0]
    assert spec.standardize([1, 1 + 2.0**-23, 1], eps=0) != [0, 0, 0]


def test_clip_rms_bounds_the_root_mean_square():
    assert spec.clip_rms([2, -2, 2, -2]) == [1, -1, 1, -1]
    assert spec.clip_rms([0.5, -0.5]) == [0.5, -0.5]


@given(vectors, limits)
def test_soft_clip_never_exceeds_its_limit_and_never_grows(xs, limit):
    n, clipped = spec.norm(xs), spec.norm(spec.soft_clip(xs, limit))
    assert clipped <= min(n, limit) * (1 + 1e-12)
    assert clipped == about(n / (1 + n / limit), rel=1e-12)


def test_sign_keeps_nan_visible():
    assert spec.sign([-2.5, 0.0, 3, -inf, nan]) == about([-1, 0, 1, -1, nan])


def test_nan_to_num_replaces_each_kind():
    assert spec.nan_to_num([1.5, nan, inf, -inf]) == [1.5, 0, 0, 0]
    assert spec.nan_to_num([1.5, nan, inf, -inf], 1, 2, 3) == [1.5, 1, 2, 3]


def test_agc_limits_a_unit_by_the_norm_of_its_weights():
    assert spec.agc([3, 4], [6, 8]) == about([0.06, 0.08])
    assert spec.agc([0.03, 0.04], [6, 8]) == [0.03, 0.04]
    assert spec.agc([3, 4], [0, 0]) == about([6e-6, 8e-6])
    assert spec.agc([0, 0], [0, 0]) == [0, 0]


def test_delta_clip_leaves_a_share():
    assert spec.delta_clip([3, 4], 1, 0.1) == about([0.6, 0.8])
    assert spec.delta_clip([30, 40], 1, 0.1) == about([3, 4])
    assert spec.delta_clip([0.3, 0.4], 1, 0.1) == [0.3, 0.4]
    assert spec.delta_clip([3, -4], 1, 1) == [3, -4]


def test_clippy_shortens_all_for_the_entry_that_goes_farthest_beyond_its_weight():
    assert spec.clippy([2, 0.01], [4, 0], 0.1, 0.02) == about([0.42, 0.0021])
    assert spec.clippy([0.1, 0], [-4, 0], 0.1, 0) == [0.1, 0]
    assert spec.clippy([1, 1], [1, 0], 0.1, 0) == [0, 0]


# --- what all of them share

STATELESS = {
    "clip_norm": spec.clip_norm,
    "clip_by": spec.clip_by,
    "clip_rms": spec.clip_rms,
    "soft_clip": spec.soft_clip,
    "normalize": spec.normalize,
    "agc": lambda xs, limit: spec.agc(xs, [1.0], limit),
    "delta_clip": spec.delta_clip,
    "clippy": lambda xs, limit: spec.clippy(xs, [1.0] * len(xs), limit),
    "clip_norm_by_ema": lambda xs, limit: spec.clip_norm_by_ema(xs, spec.Average(), eps=limit)[0],
    "normalize_by_ema": lambda xs, limit: spec.normalize_by_ema(xs, spec.Average(), eps=limit)[0],
}


@pytest.mark.parametrize("name", STATELESS)
def test_zeros_stay_zeros_and_nothing_stays_nothing(name):
    assert STATELESS[name]([0.0, 0.0], 1.0) == [0.0, 0.0]
    assert STATELESS[name]([], 1.0) == []


@pytest.mark.parametrize("name", STATELESS)
def test_an_infinite_norm_gives_zeros_and_nans_and_a_nan_gives_nans(name):
    assert STATELESS[name]([3.0, inf, -inf], 1.0) == about([0, nan, nan])
    assert STATELESS[name]([3.0, nan, inf], 1.0) == about([nan, nan, nan])


@pytest.mark.parametrize(
    "name", ["clip_norm", "clip_by", "clip_rms", "soft_clip", "normalize", "agc"]
)
def test_a_limit_of_zero_gives_zeros(name):
    assert STATELESS[name]([3.0, -4.0], 0) == [0, 0]


@pytest.mark.parametrize("name", ["clip_norm", "clip_by", "clip_rms", "soft_clip", "agc"])
def test_a_limit_of_inf_never_clips_not_even_an_infinite_norm(name):
    assert STATELESS[name]([3.0, inf], inf) == [3.0, inf]


# --- growth


@pytest.mark.parametrize(
    ("hyperparameters", "norms", "expected"),
    [
        ({}, [1, 10, 10, 10, 10], [1, 1.5, 2.25, 3.375, 5.0625]),
        ({}, [1, 0.1, 0.1, 0.1, 10], [1, 0.1, 0.1, 0.1, 0.1875]),
        ({}, [0, 1, 10, 1], [0, 1, 1.5, 1]),
        ({"add": 1, "mul": None}, [1, 10, 10], [1, 2, 3]),
        ({"add": 1}, [1, 10, 10, 10], [1, 1.5, 2.25, 3.25]),
        ({}, [1e-5, 1e-3, 1e-3], [1e-5, 1.5e-4, 2.25e-4]),
        ({}, [1, inf, 10], [1, nan, 1.5]),
        ({}, [nan, inf, 1, 10], [nan, inf, 1, 1.5]),
        ({"max_decay": inf}, [1, 0.1, 10], [1, 0.1, 0.15]),
        ({"mul": 0}, [1, 10, 10], [1, 0, 0]),
    ],
)
def test_a_norm_may_grow_by_so_much_a_step(hyperparameters, norms, expected):
    got = outputs(spec.clip_norm_growth, norms, spec.Growth(), **hyperparameters)
    assert got == about(expected)


def test_growth_is_exact_for_fractions():
    half = Fraction(1, 2)
    got = outputs(spec.clip_norm_growth, [half] + [Fraction(9)] * 3, spec.Growth(), mul=3 * half)
    assert got == [half, Fraction(3, 4), Fraction(9, 8), Fraction(27, 16)]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_no_norm_grows_by_more_than_the_factor_over_all_before_it(norms):
    got = outputs(spec.clip_norm_growth, norms, spec.Growth())
    assert all(c <= n for c, n in zip(got, norms, strict=True))
    seen = [c for c in got if c > 0]
    assert all(c <= max(*seen[:i], 1e-4) * 1.5 * (1 + 1e-12) for i, c in enumerate(seen) if i > 1)


def test_an_entry_may_grow_by_so_much_a_step_and_keeps_its_sign():
    assert outputs(spec.clip_value_growth, [1, -10, 10], spec.Growth()) == [1, -1.5, 2.25]
    got = outputs(spec.clip_value_growth, [1, -inf, 10, nan, 10], spec.Growth())
    assert got == about([1, -1.5, 1.5, nan, 2.25])
    assert outputs(spec.clip_value_growth, [0, inf, -7, 70], spec.Growth()) == [0, inf, -7, 10.5]


# --- EMA


@pytest.mark.parametrize(
    ("hyperparameters", "inputs", "expected"),
    [
        ({}, [1] * 5, [0.01, 0.015, 0.0225, 0.032275, 0.041952]),
        ({"beta": 0.5}, [1, 1, 1, 100, 100], [0.5, 0.75, 0.875, 1.3125, 1.96875]),
        (
            {"beta": 0.5, "max_ema_growth": None},
            [1, 1, 1, 100, 100],
            [0.5, 0.75, 0.875, 50.4375, 75.21875],
        ),
        ({}, [0, 1, 1, 1], [0, 0.01, 0.015, 0.0225]),
        (
            {"beta": 0.9, "max_ema_growth": None},
            [1, -1, 1, -1],
            [0.1, -0.01, 0.091, -0.0181],
        ),
        ({"beta": 0.5}, [1, 1, inf, 1], [0.5, 0.75, nan, 0.875]),
        ({"beta": 0.5}, [nan, 1, 1], [nan, 0.5, 0.75]),
        ({"ema_init": "update"}, [1, 1, 3], [1, 1, 1.02]),
        ({"ema_init": "update"}, [nan, 2, 2], [nan, 2, 2]),
    ],
)
def test_clip_norm_by_ema_lets_the_norm_of_the_average_through(hyperparameters, inputs, expected):
    got = one_entry(spec.clip_norm_by_ema, inputs, spec.Average(), **hyperparameters)
    assert got == about(expected, rel=1e-4 if expected[-1] == 0.041952 else 1e-9)


def test_normalize_by_ema_also_scales_up():
    got = one_entry(spec.normalize_by_ema, [1, 1, 0.1, 1], spec.Average(), beta=0.5)
    assert got == about([0.5, 0.75, 0.425, 0.6375])


def test_an_average_that_vanishes_for_a_step_is_bounded_by_the_one_before():
    half = {"beta": Fraction(1, 2), "max_ema_growth": 2}
    _, state = spec.run(spec.clip_norm_by_ema, [[2], [-1]], spec.Average(), **half)
    assert state == spec.Average((0,), 1)
    assert spec.clip_norm_by_ema([100], state, **half)[1].norm == 2


@given(
    st.lists(st.lists(fractions, min_size=2, max_size=2), max_size=4),
    st.sampled_from(["l1", "linf", "mad"]),
)
def test_the_average_never_grows_faster_than_allowed(steps, ord):
    state, half = spec.Average(), Fraction(1, 2)
    for xs in steps:
        _, after = spec.clip_norm_by_ema(xs, state, half, ord, 0, 3 * half)
        assert state.norm == 0 or spec.norm(after.mean, ord) <= state.norm * 3 * half
        state = after


@given(vectors.filter(len), st.sampled_from(["zeros", "update"]))
def test_clip_norm_by_ema_equals_clipping_by_the_norm_of_the_average(xs, init):
    y, state = spec.clip_norm_by_ema(xs, spec.Average(), 0.5, 2, 0, None, init)
    assert y == about(xs if init == "update" else [x / 2 for x in xs])
    assert list(state.mean) == about(y)


def test_clip_value_by_ema_bounds_every_entry_by_its_average():
    assert one_entry(spec.clip_value_by_ema, [1, 1, 1], ()) == about([0.01, 0.0199, 0.029701])
    rows, state = spec.run(spec.clip_value_by_ema, [[4, -8], [inf, nan], [-4, 8]], (), beta=0.5)
    assert rows == [[2, -4], [2, about(nan)], [-3, 6]]
    assert state == (3, 6)


def test_clip_value_by_ema_starts_from_the_first_finite_entry_with_update():
    got = one_entry(spec.clip_value_by_ema, [inf, -2, 8], (), beta=0.5, ema_init="update")
    assert got == [inf, -2, 5]


def test_clip_value_by_ema_clamps_to_the_size_of_what_ema_tfm_makes():
    rows, state = spec.run(
        spec.clip_value_by_ema, [[4, -8]] * 2, (), beta=0.5, ema_tfm=lambda m: [-x / 2 for x in m]
    )
    assert rows == [[1, -2], [1.5, -3]]
    assert state == (3, 6)


# --- past norms

NORMS = [2, 3, 4, 3, 10, 3, 0.1, 3]


@pytest.mark.parametrize(
    ("observe", "mean", "var"), [("raw", 3.107271, 2.482294), ("clipped", 2.939323, 1.128411)]
)
def test_z_stat_gives_the_numbers_of_its_page(observe, mean, var):
    got, state = warmed(spec.z_stat, NORMS, spec.moments, 3, 1, observe=observe)
    assert got == about([1, 1, 1, 3, 3.866071, 3, 0.1, 3])
    assert state == about((mean, var))


@pytest.mark.parametrize(
    ("clipping", "limit"),
    [
        ("reciprocal", 3 + 6.25 / 7),
        ("max", 5.5),
        ("mean", 3),
        (lambda z, t: z - t, 3 + 4.5),
    ],
)
def test_z_stat_clips_with_a_function_of_the_score_by_name_or_your_own(clipping, limit):
    clipped, _ = spec.z_stat(10, spec.Moments(3, 1), clipping=clipping)
    assert clipped == about(limit)


def test_a_score_counts_in_deviations_and_a_little():
    state = spec.Moments(0, 1e-16)
    assert spec.z_stat(3e-8, state, clipping="mean")[0] == 3e-8
    assert spec.z_stat(6e-8, state, clipping="mean")[0] == 0


def start_of_ratio(norms):
    return spec.moments(norms).mean


@pytest.mark.parametrize(
    ("clipping", "norms", "expected"),
    [
        (
            "max",
            [2, 4, 3, 6, 3.15, 3.3, 0.1, 3],
            [2, 4, 3, 3.15, 3.15, 3.214890, 0.1, 3],
        ),
        ("mean", [2, 4, 3, 6, 3], [2, 4, 3, 3, 3]),
        ("reciprocal", [2, 4, 3, 6], [2, 4, 3, 3.0075]),
    ],
)
def test_ema_ratio_gives_the_numbers_of_its_page(clipping, norms, expected):
    got, _ = warmed(spec.ema_ratio, norms, start_of_ratio, 2, inf, clipping=clipping)
    assert got == about(expected)


@pytest.mark.parametrize(
    ("mode", "spike"), [("adaptive", 3.577382), ("mean", 3), ("percentile", 5.010390)]
)
def test_z_clip_gives_the_numbers_of_its_page(mode, spike):
    got, state = warmed(
        spec.z_clip,
        NORMS,
        lambda norms: spec.moments(norms, unbiased=False),
        3,
        inf,
        max_norm=None,
        mode=mode,
    )
    assert got == about([2, 3, 4, 3, spike, 3, 0.1, 3])
    if mode == "adaptive":
        assert state == about((2.931419, 0.814170))


def test_a_ratio_at_the_threshold_is_not_clipped():
    r = Fraction(21, 20)
    assert spec.ema_ratio(r, 1, r_thresh=r, clipping="mean")[0] == r
    assert spec.ema_ratio(r + r, 1, r_thresh=r, clipping="mean")[0] == 1
    assert spec.ema_ratio(2, 1, observe="clipped", alpha=0)[1] == about(1.05)


def test_z_clip_bounds_its_output_by_max_norm_but_observes_the_adaptive_norm():
    free = spec.z_clip(10, spec.Moments(3, 1), max_norm=None)
    bounded = spec.z_clip(10, spec.Moments(3, 1))
    assert bounded == (1, free[1])
    assert math.isnan(spec.z_clip(inf, spec.Moments(3, 0))[0])


def test_z_clip_can_skip_a_spike():
    state = spec.Moments(3, 1)
    assert spec.z_clip(10, state, skip_on_spike=True)[0] == 0
    assert spec.z_clip(4, state, max_norm=None, skip_on_spike=True)[0] == 4
    assert spec.z_clip(10, state, skip_on_spike=True)[1] == spec.z_clip(10, state)[1]
    assert math.isnan(spec.z_clip(inf, state, skip_on_spike=True)[0])


def test_z_score_clip_gives_the_thresholds_of_its_page():
    state, thresholds = spec.Powers(), []
    assert spec.z_score_threshold(state) == inf
    for x in [1, 1, 2, 1, 10]:
        _, state = spec.z_score_clip(x, state, 1, 0.9)
        thresholds.append(spec.z_score_threshold(state, 1))
    assert thresholds == about([1, 1, 1.4, 1.376182, 4.667753])


def test_a_statistic_of_zero_sets_no_limit_yet():
    assert spec.z_stat(5, spec.Moments(1, 0))[0] == 5
    assert spec.z_clip(5, spec.Moments(1, 0), max_norm=None)[0] == 5
    assert outputs(spec.z_score_clip, [0.1, 0.1, 0.1, 5], spec.Powers()) == [0.1, 0.1, 0.1, 5]
    assert outputs(spec.ema_ratio, [0, 5], 0) == [0, 5]
    assert outputs(spec.quantile, [0, 5], ()) == [0, 5]
    assert outputs(spec.p2_quantile, [0, 5], spec.Markers()) == [0, 5]
    assert outputs(spec.ema_quantile, [0, 5], spec.Tracked()) == [0, 5]
    assert outputs(spec.auto_clip, [1, 1, 5], spec.Record()) == [1, 1, 5]
    assert outputs(spec.ada_gc, [0, 5], spec.Reference(), warmup_steps=1) == [0, 5]


def test_a_warm_up_counts_finite_norms_only():
    got, state = spec.run(
        spec.adaptive_clip, [2, inf, nan, 4], spec.WarmUp(), rule=spec.z_stat, start=spec.moments,
        warmup_steps=3,
    )  # fmt: skip
    assert got == about([1, nan, nan, 1])
    assert state == spec.WarmUp((2, 4))


# --- quantiles


@given(st.lists(fractions.map(abs), min_size=1, max_size=9))
def test_the_quantile_is_interpolated_between_the_sorted_norms(norms):
    assert spec.interpolated_quantile(norms, Fraction(1, 2)) == statistics.median(norms)
    assert spec.interpolated_quantile(norms, 0) == min(norms)
    assert spec.interpolated_quantile(norms, 1) == max(norms)


def test_the_quantile_looks_at_the_last_norms_only():
    got, norms = spec.run(spec.quantile, [1, 2, 3, 100, 100], (), q=0.5, window=3)
    assert got == [1, 1, 1.5, 2, 3]
    assert norms == (3, 100, 100)


JAIN_CHLAMTAC = [
    0.02, 0.15, 0.74, 3.39, 0.83, 22.37, 10.15, 15.43, 38.62, 15.92,
    34.6, 10.28, 1.47, 0.4, 0.05, 11.39, 0.27, 0.42, 0.09, 11.37,
]  # fmt: skip


@pytest.mark.parametrize(("count", "median"), [(5, 0.74), (8, 2.178333), (20, 4.440634)])
def test_p2_gives_the_numbers_of_its_paper(count, median):
    _, markers = spec.run(spec.p2_quantile, JAIN_CHLAMTAC[:count], spec.Markers(), q=0.5)
    assert spec.p2_estimate(markers, 0.5) == about(median)


def test_p2_puts_a_norm_above_the_marker_it_equals():
    five = spec.Markers((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
    assert spec.p2_observe(3, five, 0.5) == ((1, 2, 3, 4, 5), (1, 2, 3, 5, 6))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_p2_keeps_its_markers_in_order_between_the_extremes(norms, q):
    _, (heights, positions) = spec.run(spec.p2_quantile, norms, spec.Markers(), q=q)
    assert list(heights) == sorted(heights)
    assert (heights[0], heights[-1]) == (min(norms), max(norms))
    assert positions[-1] == len(norms)
    assert all(a < b for a, b in pairwise(positions))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.floats(0.05, 0.95))
def test_p2_is_the_quantile_itself_before_there_are_five_norms(norms, q):
    _, markers = spec.run(spec.p2_quantile, norms[:4], spec.Markers(), q=q)
    assert spec.p2_estimate(markers, q) == spec.interpolated_quantile(norms[:4], q)


@pytest.mark.parametrize("q", [0.5, 0.95])
@pytest.mark.parametrize("rule", ["p2", "ema"])
def test_the_streaming_quantiles_settle_at_the_quantile(rule, q):
    rng, estimates = random.Random(0), []
    state = spec.Markers() if rule == "p2" else spec.Tracked()
    for _ in range(20_000):
        if rule == "p2":
            state = spec.p2_quantile(rng.random(), state, q)[1]
            estimates.append(spec.p2_estimate(state, q))
        else:
            state = spec.ema_quantile(rng.random(), state, q)[1]
            estimates.append(state.quantile)
    assert statistics.mean(estimates[10_000:]) == about(q, rel=0, abs=0.02)


@pytest.mark.parametrize(("n", "after"), [(3, (1.375, 1.5)), (1, (1.125, 0.5)), (0, (0.75, 1))])
def test_the_ema_quantile_moves_by_a_share_of_the_spread(n, after):
    assert spec.ema_quantile(n, spec.Tracked(1, 1), q=0.5, ema_decay=0.5) == (min(n, 1), after)


def test_the_ema_quantile_falls_as_well_as_rises_and_never_below_zero():
    rng = random.Random(0)
    _, high = spec.run(spec.ema_quantile, [1 + rng.random() for _ in range(3000)], spec.Tracked())
    _, low = spec.run(spec.ema_quantile, [rng.random() for _ in range(3000)], high)
    assert high.quantile > 1.9
    assert 0.9 < low.quantile < 1
    _, after_spike = spec.run(spec.ema_quantile, [1e6] + [1.0] * 3000, low)
    assert after_spike.quantile >= 0


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=30))
def test_auto_clip_is_the_p2_median_plus_three_unbiased_deviations(norms):
    _, state = spec.run(spec.auto_clip, norms, spec.Record())
    assert state.steps == len(norms)
    assert state.mean == about(statistics.mean(norms), rel=1e-9, abs=1e-12)
    std = math.sqrt(state.m2 / (len(norms) - 1))
    assert std == about(statistics.stdev(norms), rel=1e-6, abs=1e-9)
    _, markers = spec.run(spec.p2_quantile, norms, spec.Markers(), q=0.5)
    assert state.markers == markers
    limit = spec.p2_estimate(markers, 0.5) + 3 * std
    assert spec.auto_clip(1e9, state)[0] == (limit if state.m2 > 0 else 1e9)


# --- AdaGC


def test_ada_gc_gives_the_gammas_of_its_page():
    state, gammas = spec.Reference(), []
    for n in [2, 0.5, 4, 4, 4, 0.1]:
        _, state = spec.ada_gc(n, state, warmup_steps=3)
        gammas.append(state.gamma)
    assert gammas == about([1, 0.5, 0.5005, 0.501001, 0.501502, 0.493471])


def test_ada_gc_clips_by_the_global_norm_while_it_warms_up():
    assert spec.ada_gc(3, spec.Reference(), total=5) == (about(0.6), (about(0.6), 1))
    assert spec.ada_gc(0.5, spec.Reference(), total=0.9) == (0.5, (0.5, 1))


def test_ada_gc_forgets_a_step_whose_global_norm_is_not_finite():
    assert spec.ada_gc(3, spec.Reference(), total=inf) == (0, spec.Reference())
    assert spec.ada_gc(3, spec.Reference(), absolute=inf, total=nan) == (3, spec.Reference())


def test_ada_gc_may_have_a_limit_of_zero():
    assert outputs(spec.ada_gc, [4, 8], spec.Reference(), rel=0, warmup_steps=1) == [4, 0]


def test_a_zero_first_gradient_does_not_freeze_a_tensor():
    got, state = spec.run(spec.ada_gc, [0, 0.5, 4], spec.Reference(), warmup_steps=3)
    assert got == about([0, 0.5, 0.525])
    assert state == (about(0.5005), 3)
    assert outputs(spec.ada_gc, [0, 0, 0, 4, 8], spec.Reference(), warmup_steps=3) == about(
        [0, 0, 0, 4, 4.2]
    )


# --- what all rules with state share

START = spec.Moments(1, Fraction(1, 100))
STATEFUL = {
    "clip_norm_growth": (spec.clip_norm_growth, spec.Growth()),
    "clip_value_growth": (spec.clip_value_growth, spec.Growth()),
    "z_stat": (spec.z_stat, START),
    "z_clip": (spec.z_clip, START),
    "ema_ratio": (spec.ema_ratio, 1),
    "z_score_clip": (spec.z_score_clip, spec.Powers()),
    "quantile": (spec.quantile, ()),
    "p2_quantile": (spec.p2_quantile, spec.Markers()),
    "ema_quantile": (spec.ema_quantile, spec.Tracked()),
    "auto_clip": (spec.auto_clip, spec.Record()),
    "ada_gc": (spec.ada_gc, spec.Reference()),
}


@pytest.mark.parametrize("name", STATEFUL)
@given(data=st.data())
def test_a_non_finite_norm_leaves_no_trace(name, data):
    rule, state = STATEFUL[name]
    norms = data.draw(st.lists(st.floats(0.5, 2), max_size=8))
    before = spec.run(rule, norms, state)[1]
    for bad in (nan, inf):
        y, after = rule(bad, before)
        assert after == before
        assert not spec.finite(y) or name == "clip_value_growth"


@pytest.mark.parametrize("name", STATEFUL)
def test_a_spike_cannot_raise_its_own_limit(name):
    rule, state = STATEFUL[name]
    rng = random.Random(0)
    _, state = spec.run(rule, [0.9 + 0.2 * rng.random() for _ in range(200)], state)
    assert rule(1000, state)[0] < 2


@pytest.mark.parametrize("name", STATEFUL)
@given(norms=st.lists(st.floats(0, 1e4), max_size=20))
def test_no_rule_makes_a_norm_larger_or_negative(name, norms):
    rule, state = STATEFUL[name]
    assert all(0 <= c <= n for c, n in zip(outputs(rule, norms, state), norms, strict=True))


@given(st.lists(st.lists(floats, min_size=2, max_size=2), max_size=6), st.sampled_from([nan, inf]))
def test_a_non_finite_entry_leaves_no_trace_in_an_average(steps, bad):
    for rule in (spec.clip_norm_by_ema, spec.normalize_by_ema):
        before = spec.run(rule, steps, spec.Average())[1]
        assert rule([1.0, bad], before)[1] == before
