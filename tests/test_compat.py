"""compat: torch's calls with the import changed give torch's results, or more exact ones."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import at_once
from tests.processes.launch import on_ranks
from torchzero_clip import compat

inf, nan = math.inf, math.nan
ORDERS = [0.5, 1, 1.5, 2, 3.5, "inf", inf, -0.5, -1, -2, -3.5, "-inf", -inf]


def gradients(*grads: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters with these gradients; None for one that has none."""
    made = []
    for grad in grads:
        value = None if grad is None else torch.as_tensor(grad, dtype=dtype).clone()
        p = torch.zeros(2, dtype=dtype) if value is None else torch.zeros_like(value)
        p.requires_grad_().grad = value
        made.append(p)
    return made


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """A model's gradients, of some shapes, no entry of them near zero."""
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [[choose.randint(1, 5) for _ in range(choose.randint(0, 3))] for _ in range(4)]
    values = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    return gradients(*[v + v.sign() for v in values], None, dtype=dtype)


def grads_of(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("name", compat.__all__)
def test_arguments_and_defaults_are_those_of_torch(name):
    ours = inspect.signature(getattr(compat, name)).parameters
    theirs = inspect.signature(getattr(nn.utils, name)).parameters
    more = [key for key in ours if key not in theirs]
    added = {"clip_grad_norm_": ["process_group", "grad"], "get_total_norm": []}
    assert more == added.get(name, ["grad"])
    assert [(key, p.default) for key, p in ours.items() if key in theirs] == [
        (key, p.default) for key, p in theirs.items()
    ]
    assert all(ours[key].kind is inspect.Parameter.KEYWORD_ONLY for key in more)


@pytest.mark.parametrize("order", ORDERS)
@at_once("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_every_order_are_those_of_torch(order, dtype):
    """Half precisions against torch in float64: its own rounds the norm of every tensor."""
    half = dtype.itemsize == 2
    for seed in range(8):
        ours = drawn(seed, dtype)
        theirs = gradients(*[p.grad for p in ours], dtype=torch.float64 if half else dtype)
        limit = 10.0 ** random.Random(seed).uniform(-2, 2)
        got = compat.clip_grad_norm_(iter(ours), limit, order, foreach=False)
        want = nn.utils.clip_grad_norm_(theirs, limit, order)
        assert (got.shape, got.dtype, got.device) == ((), dtype, want.device)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want.double(), rtol=4 * eps, atol=0)
        for a, b in zip(grads_of(ours), grads_of(theirs), strict=True):  # it adds 1e-6 to the norm
            torch.testing.assert_close(a.double(), b.double(), rtol=4 * eps + 2e-4, atol=0)


@pytest.mark.parametrize("limit", [0.5, 1])
def test_values_are_those_of_torch_to_the_bit(limit):
    ours = drawn(0, torch.float32)
    theirs = gradients(*[p.grad for p in ours])
    assert compat.clip_grad_value_(ours, limit, foreach=True) is None
    nn.utils.clip_grad_value_(theirs, limit)
    assert all(map(torch.equal, grads_of(ours), grads_of(theirs)))


def test_every_element_counts_and_all_gradients_are_one():
    """Unlike our own helper, which leaves single entries alone and clips each tensor by itself."""
    params = gradients([30.0], [0.0, 40.0])
    assert compat.clip_grad_norm_(params, 1.0).item() == 50.0
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6]))
    torch.testing.assert_close(params[1].grad, torch.tensor([0.0, 0.8]))


@pytest.mark.parametrize("norm", [torch.tensor(1.0), "1", 1])
def test_limits_are_whatever_float_takes(norm):
    (p,) = gradients([3.0, 4.0])
    assert compat.clip_grad_norm_(p, norm).item() == 5.0
    compat.clip_grad_value_(p, torch.tensor(0.7))
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.7]))


def test_no_gradients_give_zero_and_an_empty_generator_a_warning():
    for params in ([], gradients(None)):
        assert compat.clip_grad_norm_(params, 1.0).item() == 0.0
        compat.clip_grad_value_(params, 1.0)
    with pytest.warns(UserWarning, match="`parameters` is an empty generator") as seen:
        total = compat.clip_grad_norm_((p for p in []), 1.0)
    assert total.item() == 0.0
    assert seen[0].filename == __file__


def test_dtypes_of_a_mixed_model_are_joined_as_torch_joins_them():
    for dtypes in [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)]:
        ours = [gradients([3.0, 4.0], dtype=dtype)[0] for dtype in dtypes]
        theirs = [gradients([3.0, 4.0], dtype=dtype)[0] for dtype in dtypes]
        got, want = compat.clip_grad_norm_(ours, 1), nn.utils.clip_grad_norm_(theirs, 1)
        assert got.dtype == want.dtype
        assert got.item() == pytest.approx(math.sqrt(50), rel=1e-6)


# ---------------------------------------------------------------------- more exact than torch


def test_what_is_within_the_limit_keeps_every_bit():
    params = gradients([3.0, 4.0])
    compat.clip_grad_norm_(params, 5.0)
    assert params[0].grad.tolist() == [3.0, 4.0]  # torch: 2.9999995


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_norms_neither_overflow_nor_vanish(size):
    params = gradients([3.0 * size, 4.0 * size])
    total = compat.clip_grad_norm_(params, size)
    torch.testing.assert_close(total, torch.tensor(5.0 * size), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        params[0].grad, torch.tensor([0.6 * size, 0.8 * size]), rtol=1e-6, atol=0
    )


def test_negative_orders_see_zeros_and_the_smallest_entries():
    for grads, order, norm in [
        ([4.0, 4.0], -1, 2.0),
        ([4.0, 0.0], -1, 0.0),
        ([4.0, -3.0], -inf, 3.0),
        ([2e-42, 2e-42], -1, 1e-42),
        ([inf, 4.0], -2, 4.0),
    ]:
        total = compat.clip_grad_norm_(gradients(grads), 1e9, order)
        torch.testing.assert_close(total, torch.tensor(norm), rtol=1e-6, atol=0)
    assert compat.clip_grad_norm_(gradients([nan, 1.0]), 1.0, -2).isnan()


def test_a_norm_of_zero_leaves_gradients_alone():
    params = gradients([4.0, 0.0])
    compat.clip_grad_norm_(params, 1e-9, -1)
    assert params[0].grad.tolist() == [4.0, 0.0]


# ---------------------------------------------------------------------- trouble


@pytest.mark.parametrize("order", [0.5, 2, inf, -2])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_an_error_is_raised_where_torch_raises_it_and_nothing_is_changed(order, bad):
    ours, theirs = gradients([bad, bad], [1.0]), gradients([bad, bad], [1.0])

    def error(call: Any, params: list[Tensor]) -> str:
        try:
            call(params, 1.0, order, error_if_nonfinite=True)
        except RuntimeError as raised:
            return str(raised)
        return ""

    assert error(compat.clip_grad_norm_, ours) == error(nn.utils.clip_grad_norm_, theirs)
    if bad is nan:
        assert str(ours[0].grad.tolist()) == "[nan, nan]"
        assert ours[1].grad.tolist() == [1.0]


@pytest.mark.parametrize("order", [2, 3.5, -2, -3.5, 1, 0.5, inf])
def test_powers_that_overflow_are_an_error_as_in_torch_though_the_norm_is_finite(order):
    raised = []
    for call in (compat.clip_grad_norm_, nn.utils.clip_grad_norm_):
        params = gradients([1e30, 1e30])
        try:
            call(params, 1.0, order, error_if_nonfinite=True)
            raised.append(False)
        except RuntimeError:
            raised.append(True)
    assert raised[0] == raised[1] == (order in (2, 3.5, -2, -3.5))


@pytest.mark.parametrize("bad", [nan, inf])
def test_without_the_error_trouble_goes_where_torch_lets_it_go(bad):
    ours, theirs = gradients([bad, 1.0]), gradients([bad, 1.0])
    assert str(compat.clip_grad_norm_(ours, 1.0)) == str(nn.utils.clip_grad_norm_(theirs, 1.0))
    assert str(ours[0].grad) == str(theirs[0].grad)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: compat.clip_grad_norm_(p, -1.0), "max_norm must be a number of at least 0"),
        (lambda p: compat.clip_grad_norm_(p, nan), "max_norm must be a number of at least 0"),
        (lambda p: compat.clip_grad_value_(p, -1.0), "value must be a number of at least 0"),
        (lambda p: compat.clip_grad_norm_(nn.Linear(1, 1), 1.0), "pass model.parameters()"),
    ],
)
def test_what_torch_takes_in_silence_and_cannot_mean_is_a_sentence(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(gradients([3.0]))


@pytest.mark.slow
def test_several_processes_have_one_norm():
    """Shards of FSDP2, stages of a pipeline, a stage without gradients, and partial sums."""
    for out in on_ranks(2, "-m", "tests.processes.compat"):
        assert out.split() == ["shards", "stages", "nothing", "partial", "error"]


# ---------------------------------------------------------------------- the two halves


@at_once("order", ORDERS)
def test_the_norm_and_the_clip_by_it_are_together_the_one_call(order):
    for seed in range(4):
        whole, halves = drawn(seed, torch.float32), drawn(seed, torch.float32)
        want = compat.clip_grad_norm_(whole, 0.1, order)
        got = compat.get_total_norm(iter(grads_of(halves)), order, foreach=False)
        assert (got.shape, got.dtype, got.item()) == ((), want.dtype, want.item())
        before = [g.clone() for g in grads_of(halves)]
        assert all(map(torch.equal, before, grads_of(halves)))
        assert compat.clip_grads_with_norm_(halves, 0.1, got) is None
        torch.testing.assert_close(grads_of(halves), grads_of(whole), rtol=1e-6, atol=0)


def test_a_norm_of_one_tensor_and_of_none_and_of_one_that_is_there_twice():
    assert compat.get_total_norm(torch.tensor([3.0, 4.0])).item() == 5.0
    assert compat.get_total_norm([]).item() == 0.0
    twice = [torch.tensor([3.0])] * 2
    assert compat.get_total_norm(twice, 1).item() == nn.utils.get_total_norm(twice, 1).item() == 6.0
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    assert compat.get_total_norm([weight]).item() == 5.0
    assert weight.grad is None


def test_a_clip_by_any_norm_divides_by_what_is_above_the_limit():
    params = gradients([3.0, 4.0], None, [5.0])
    compat.clip_grads_with_norm_(params, 1.0, torch.tensor(10.0))
    torch.testing.assert_close(params[0].grad, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(params[2].grad, torch.tensor([0.5]))
    compat.clip_grads_with_norm_(params, 1.0, 0.5)  # torch takes a number too
    torch.testing.assert_close(params[0].grad, torch.tensor([0.3, 0.4]), rtol=0, atol=0)
    compat.clip_grads_with_norm_(gradients(None), 1.0, torch.tensor(10.0))


def test_a_norm_that_is_no_number_is_an_error_where_it_is_asked_for():
    assert compat.get_total_norm([torch.tensor([inf])]).item() == inf
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 for gradients"):
        compat.get_total_norm([torch.tensor([inf])], error_if_nonfinite=True)


# ---------------------------------------------------------------------- tags of Megatron-LM


def tagged(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A model's gradients, of which the second parameter has a norm group of Megatron-LM's."""
    params = drawn(seed, dtype)
    vars(params[1])["grad_norm_group"] = "mtp"
    return params


@pytest.mark.parametrize("order", ORDERS)
def test_a_tag_of_a_parameter_changes_nothing(order):
    """torch reads no `grad_norm_group`, and takes one norm of all gradients."""
    for seed in range(4):
        ours, theirs = tagged(seed), drawn(seed, torch.float32)
        got = compat.clip_grad_norm_(ours, 0.1, order)
        torch.testing.assert_close(got, nn.utils.clip_grad_norm_(theirs, 0.1, order))
        torch.testing.assert_close(grads_of(ours), grads_of(theirs), rtol=2e-4, atol=0)
        halves = tagged(seed)
        total = compat.get_total_norm(grads_of(halves), order)
        assert total == got
        compat.clip_grads_with_norm_(halves, 0.1, total)
        torch.testing.assert_close(grads_of(halves), grads_of(ours), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_number_is_an_error_on_either_side_of_a_tag(bad):
    params = tagged(0)
    params[bad].grad.fill_(nan)
    before = [g.clone() for g in grads_of(params)]
    with pytest.raises(RuntimeError, match="is non-finite"):
        compat.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for a, b in zip(before, grads_of(params), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
