"""The numbers of the specification by hand: growth and averages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import about
from tests.modules.numbers.common import Bench, inf, nan, sequence
from torchzero_clip import (
    EMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    NormalizeByEMA,
    Scale,
)


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
    with pytest.raises(ValueError, match=f"{rule.__name__}: pass add= or mul=, got None for both"):
        rule(add=None, mul=None)


def test_an_entry_may_grow_by_so_much_a_step_and_keeps_its_sign():
    assert sequence(ClipValueGrowth(), [1, -10, 10]) == about([1, -1.5, 2.25])
    assert sequence(ClipValueGrowth(add=1.0, mul=None), [1, -10, 10]) == about([1, -2, 3])
    assert sequence(ClipValueGrowth(), [0, 5, -100]) == about([0, 5, -7.5])


def test_every_entry_has_a_bound_of_its_own():
    bench = Bench(ClipValueGrowth(), 2)
    bench([1.0, -0.1])
    assert bench([10.0, 10.0])[0].tolist() == about([1.5, 0.15])


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
