"""The numbers of the specification by hand: what is measured together."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import about
from tests.modules.numbers.common import Bench, once
from torchzero_clip import (
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    SoftClip,
)


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
    with pytest.raises(ValueError, match="ClipNorm: inverse_dims=True requires dim"):
        ClipNorm(1.0, inverse_dims=True)
    with pytest.raises(ValueError, match=r"Normalize: inverse_dims=True requires dim.*'global'"):
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
        with pytest.raises(
            ValueError, match=f"{rule.__name__}: tensorwise=False means dim='global'.*'group'"
        ):
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
    with pytest.raises(
        ValueError, match=f"{rule.__name__}: dim must be None.*keeps state between steps"
    ):
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
