"""The numbers of the specification by hand: rules without state."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import about
from tests.modules.numbers.common import inf, nan, once
from torchzero_clip import (
    Centralize,
    ClipNorm,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    NanToNum,
    Normalize,
    Sign,
    SoftClip,
    Standardize,
)


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
