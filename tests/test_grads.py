"""The stand-alone helpers: what torch's own do, at every scope, in place."""

import importlib
import math
import random

import pytest
import torch
from torch import nn

import torchzero_clip as tz
from tests.helpers import at_once
from torchzero_clip import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_percentile_,
    clip_grad_value_,
    normalize_grads_,
)

inf, nan = math.inf, math.nan


def with_grads(*grads, dtype=torch.float32):
    params = []
    for grad in grads:
        grad = grad.clone() if isinstance(grad, torch.Tensor) else torch.tensor(grad, dtype=dtype)
        p = torch.zeros_like(grad, requires_grad=True)
        p.grad = grad
        params.append(p)
    return params


def grads_of(params):
    return [p.grad for p in params]


def random_model(seed):
    """Parameters of some shapes and one dtype, some without a gradient; an order and a limit."""
    choose = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    scale = 10 ** choose.uniform(-0.5, 1.5)
    params = []
    for _ in range(choose.randint(1, 6)):
        shape = [choose.randint(1, 6) for _ in range(choose.randint(0, 4))]
        p = torch.zeros(shape, dtype=dtype, requires_grad=True)
        p.grad = (torch.randn(shape, generator=gen, dtype=torch.float64) * scale).to(dtype)
        params.append(p)
    # torch adds 1e-6 to the norm; a few entries of this size make that too little to see
    big = torch.zeros(3, dtype=dtype, requires_grad=True)
    big.grad = torch.full((3,), 20.0, dtype=dtype)
    without = torch.zeros(2, dtype=dtype, requires_grad=True)
    params = [big, *params, without]
    choose.shuffle(params)
    return params, choose.choice([0.5, 1, 2, 3, inf]), 10 ** choose.uniform(-1, 3), dtype


def twin(params, dtype=None):
    copies = [p.detach().clone().to(dtype).requires_grad_() for p in params]
    for p, q in zip(params, copies, strict=True):
        q.grad = None if p.grad is None else p.grad.clone().to(dtype)
    return copies


TOLERANCE = {  # relative; for the half precisions one unit in the last place
    torch.float64: 2e-7,
    torch.float32: 1e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}


@at_once("seed", range(150))
def test_the_global_norm_is_clipped_as_torch_does(seed):
    params, order, limit, dtype = random_model(seed)
    half = dtype in (torch.float16, torch.bfloat16)  # where the sums of torch overflow
    theirs = twin(params, torch.float32 if half else dtype)
    total = clip_grad_norm_(params, limit, order, dim="global")
    expected = nn.utils.clip_grad_norm_(theirs, limit, norm_type=order)
    assert total.shape == ()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for p, q in zip(params, theirs, strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            g = q.grad.to(dtype)
            torch.testing.assert_close(p.grad, g, rtol=TOLERANCE[dtype], atol=6e-8)


@at_once("seed", range(150))
def test_values_are_clipped_as_torch_does_to_the_last_bit(seed):
    params, _, limit, _ = random_model(seed)
    theirs = twin(params)
    clip_grad_value_(params, limit)
    nn.utils.clip_grad_value_(theirs, limit)
    for p, q in zip(params, theirs, strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


@at_once("order", [0.5, 1, 2, 3, inf])
@at_once("dim", [0, 1, -1, (0, 2), (0, 1, 2)])
@at_once("inverse", [False, True])
def test_slices_are_clipped_each_by_its_norm(dim, inverse, order):
    gen = torch.Generator().manual_seed(0)
    grad = torch.randn(3, 4, 5, generator=gen, dtype=torch.float64)
    dims = [d % 3 for d in (dim if isinstance(dim, tuple) else (dim,))]
    along = [d for d in range(3) if (d in dims) != inverse]
    params = with_grads(grad)
    clip_grad_norm_(params, 1.5, order, dim, inverse)
    if not along:
        assert torch.equal(params[0].grad, grad)
        return
    norm = torch.linalg.vector_norm(grad, order, along, keepdim=True)
    expected = grad * (1.5 / norm).clamp(max=1)
    torch.testing.assert_close(params[0].grad, expected, rtol=1e-12, atol=0)


def test_the_default_is_each_gradient_by_itself():
    params = with_grads([3.0, 4.0], [0.3, 0.4], [30.0, 40.0])
    with pytest.warns(UserWarning, match=r"each of the 3 gradients is clipped by its own norm\. "):
        total = clip_grad_norm_(params, 1.0)
    assert total.item() == pytest.approx(math.sqrt(25 + 0.25 + 2500))
    expected = [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]]
    for p, row in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, torch.tensor(row))


@at_once("dim", [None, 0, (0, 1), "global", "group"])
@at_once("order", [1, 2, inf, "mad", "std", "var", "sum", 0])
def test_the_total_norm_before_comes_back_at_any_dim(dim, order):
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=gen, dtype=torch.float64) for s in [(3, 4), (5,), (2, 2)]]
    flat = torch.cat([g.flatten() for g in grads])
    expected = {
        1: flat.abs().sum(),
        2: flat.norm(),
        inf: flat.abs().max(),
        "mad": flat.abs().mean(),
        "std": flat.std(),
        "var": flat.var(),
        "sum": flat.sum().abs(),
        0: torch.tensor(flat.numel()),
    }[order].double()
    for function in (clip_grad_norm_, normalize_grads_):
        total = function(with_grads(*grads), 0.5, order, dim)
        assert total.shape == ()
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_total_is_float32_and_float64_for_doubles(dtype):
    assert clip_grad_norm_(with_grads([3.0, 4.0], dtype=dtype), 1.0).dtype == torch.float32
    assert clip_grad_norm_(with_grads([3.0, 4.0], dtype=torch.float64), 1.0).dtype == torch.float64


def test_gradients_are_rewritten_in_their_own_memory():
    calls = [
        lambda p: clip_grad_norm_(p, 1.0),
        lambda p: clip_grad_norm_(p, 1.0, dim=0),
        lambda p: clip_grad_value_(p, 0.5),
        lambda p: normalize_grads_(p, 2.0),
        centralize_grads_,
        lambda p: clip_grad_percentile_(p, 50),
    ]
    for dtype in (torch.float16, torch.float32):
        for call in calls:
            params = with_grads([3.0, 4.0], dtype=dtype)
            grad, where = params[0].grad, params[0].grad.data_ptr()
            call(params)
            assert params[0].grad is grad
            assert grad.data_ptr() == where
            assert grad.dtype == dtype
            assert not grad.requires_grad
            assert grad.tolist() != [3.0, 4.0]


@pytest.mark.parametrize("kind", ["tensor", "list", "generator", "dict values"])
def test_parameters_may_be_one_tensor_or_any_iterable(kind):
    (p,) = with_grads([3.0, 4.0])
    given = {
        "tensor": lambda: p,
        "list": lambda: [p],
        "generator": lambda: (q for q in [p]),
        "dict values": {"p": p}.values,
    }[kind]
    assert clip_grad_norm_(given(), 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    clip_grad_value_(given(), 0.7)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.7]))
    centralize_grads_(given())
    torch.testing.assert_close(p.grad, torch.tensor([-0.05, 0.05]))
    normalize_grads_(given(), 2.0, inf)
    torch.testing.assert_close(p.grad, torch.tensor([-2.0, 2.0]))
    p.grad[0] = 5.0
    clip_grad_percentile_(given(), 0)
    torch.testing.assert_close(p.grad, torch.tensor([2.0, 2.0]))


def test_who_says_which_gradients_are_measured_together_hears_nothing():
    params = with_grads([3.0, 4.0], [0.3, 0.4])
    for dim in (None, 0, "global"):
        clip_grad_norm_(params, 1.0, dim=dim)
    clip_grad_norm_(params[0], 1.0)
    clip_grad_norm_(params[:1], 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: clip_grad_norm_(p, 1.0, dim="global"),
        lambda p: clip_grad_value_(p, 1.0),
        lambda p: normalize_grads_(p, 1.0),
        centralize_grads_,
        lambda p: clip_grad_percentile_(p, 99.0),
    ],
)
@pytest.mark.parametrize("given", ["gradients", "an iterator that is used up"])
def test_a_call_that_finds_no_gradients_warns_at_its_line(call, given):
    params = with_grads([3.0, 4.0], [0.3, 0.4])
    wrong = [p.grad for p in params] if given == "gradients" else iter([])
    with pytest.warns(UserWarning, match="no parameter has a gradient") as caught:
        call(wrong)
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("ignore:no parameter has a gradient:UserWarning")
@pytest.mark.parametrize("params", [[], [torch.zeros(2, requires_grad=True)]], ids=["none", "one"])
def test_no_gradients_at_all_is_a_no_op(params):
    for total in (clip_grad_norm_(params, 1.0), normalize_grads_(iter(params), 1.0)):
        assert total.shape == ()
        assert total.item() == 0.0
    clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    clip_grad_value_(params, 1.0)
    centralize_grads_(params)
    clip_grad_percentile_(params, 50.0)
    assert all(p.grad is None for p in params)


def test_a_model_is_clipped_between_backward_and_step():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model(torch.ones(2, 4)).sum().mul(100).backward()
    before = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    total = clip_grad_norm_(model.parameters(), 1.0, dim="global")
    assert total.item() == pytest.approx(before, rel=1e-6)
    after = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    assert after == pytest.approx(1.0, rel=1e-6)


# --- min_norm, min_size


def test_min_norm_scales_small_gradients_up_and_leaves_zeros():
    params = with_grads([0.3, 0.4], [0.0, 0.0], [3.0, 4.0], [30.0, 40.0])
    clip_grad_norm_(params, 10.0, min_norm=1.0)
    expected = [[0.6, 0.8], [0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]
    for p, row in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, torch.tensor(row))
    assert torch.equal(params[2].grad, torch.tensor([3.0, 4.0]))  # to the last bit


def test_min_norm_alone_only_scales_up():
    params = with_grads([0.3, 0.4], [30.0, 40.0])
    clip_grad_norm_(params, None, min_norm=1.0)
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, 0.8]))
    assert params[1].grad.tolist() == [30.0, 40.0]


def test_min_norm_works_on_the_global_norm_and_on_slices():
    params = with_grads([0.3], [0.4])
    clip_grad_norm_(params, None, dim="global", min_norm=1.0)
    assert [p.grad.item() for p in params] == pytest.approx([0.6, 0.8])
    (p,) = with_grads([[0.3, 0.4], [3.0, 4.0]])
    clip_grad_norm_(p, None, dim=1, min_norm=1.0)
    torch.testing.assert_close(p.grad, torch.tensor([[0.6, 0.8], [3.0, 4.0]]))


def test_equal_min_and_max_norm_normalise():
    params, others = with_grads([0.3, 0.4], [30.0, 40.0]), with_grads([0.3, 0.4], [30.0, 40.0])
    clip_grad_norm_(params, 2.0, min_norm=2.0)
    normalize_grads_(others, 2.0)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.grad, q.grad)


def test_units_below_min_size_are_left_alone():
    params = with_grads([5.0], [3.0, 4.0])
    clip_grad_norm_(params, 1.0, dim=None)  # its default is 2
    assert params[0].grad.item() == 5.0
    assert params[1].grad.norm().item() == pytest.approx(1.0)
    clip_grad_norm_(params, 1.0, dim=None, min_size=1)
    assert params[0].grad.item() == 1.0
    params = with_grads([5.0], [3.0, 4.0])
    normalize_grads_(params, 1.0)  # here it is 1
    assert params[0].grad.item() == 1.0
    params = with_grads([5.0], [3.0, 5.0])
    centralize_grads_(params)
    assert [p.grad.tolist() for p in params] == [[5.0], [-1.0, 1.0]]


def test_one_element_gradients_count_in_the_global_norm():
    params = with_grads([3.0], [4.0])
    clip_grad_norm_(params, 1.0, dim="global")
    assert [p.grad.item() for p in params] == pytest.approx([0.6, 0.8])


# --- the other helpers


@at_once("order", [1, 2, inf, "std", "mad"])
@at_once("dim", [None, 0, "global"])
def test_normalizing_gives_the_norm_up_and_down(order, dim):
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(3, 4, generator=gen, dtype=torch.float64) * s for s in (1e-3, 1e3)]
    params = with_grads(*grads)
    normalize_grads_(params, 2.0, order, dim)
    measure = {
        1: lambda x, d: x.abs().sum(d),
        2: lambda x, d: x.square().sum(d).sqrt(),
        inf: lambda x, d: x.abs().amax(d),
        "std": lambda x, d: x.std(d),
        "mad": lambda x, d: x.abs().mean(d),
    }[order]
    if dim == "global":
        norms = measure(torch.cat([p.grad.flatten() for p in params]), 0).view(1)
    else:
        dims = (0, 1) if dim is None else dim
        norms = torch.cat([measure(p.grad, dims).view(-1) for p in params])
    torch.testing.assert_close(norms, torch.full_like(norms, 2.0), rtol=1e-12, atol=0)


def test_centralizing_takes_the_mean_of_each_output_unit_as_the_paper_does():
    gen = torch.Generator().manual_seed(0)
    conv, bias = torch.randn(4, 3, 2, generator=gen), torch.randn(4, generator=gen)
    params = with_grads(conv, bias)
    centralize_grads_(params, dim=0, inverse_dims=True)
    torch.testing.assert_close(params[0].grad, conv - conv.mean(dim=(1, 2), keepdim=True))
    assert torch.equal(params[1].grad, bias)
    params = with_grads(conv, bias)
    centralize_grads_(params)
    torch.testing.assert_close(params[0].grad, conv - conv.mean())
    torch.testing.assert_close(params[1].grad, bias - bias.mean())


@pytest.mark.parametrize(("percentile", "bound"), [(0, 1), (50, 3), (90, 4), (99, 4), (100, 5)])
def test_percentiles_of_each_gradient_and_of_all(percentile, bound):
    row = [1.0, -2.0, 3.0, -4.0, 5.0]
    (p,) = with_grads(row)
    clip_grad_percentile_(p, percentile)
    assert p.grad.tolist() == [max(-bound, min(bound, x)) for x in row]
    params = with_grads(row[:2], row[2:])
    clip_grad_percentile_(params, percentile, "global")
    assert [x for q in params for x in q.grad.tolist()] == p.grad.tolist()


# --- what is not finite


@pytest.mark.parametrize("dim", [None, "global"])
def test_a_bad_norm_is_an_error_only_when_asked_for_and_changes_nothing_then(dim):
    for bad in (nan, inf):
        params = with_grads([1.0, bad], [3.0, 4.0])
        before = [g.clone() for g in grads_of(params)]
        with pytest.raises(RuntimeError, match=f"clip_grad_norm_.*{bad}.*error_if_nonfinite"):
            clip_grad_norm_(params, 1.0, dim=dim, error_if_nonfinite=True)
        for p, old in zip(params, before, strict=True):
            assert torch.equal(p.grad.nan_to_num(), old.nan_to_num())
    params = with_grads([3.0, 4.0])
    assert clip_grad_norm_(params, 1.0, error_if_nonfinite=True).item() == 5.0


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("order", [1, 2, inf])
def test_what_is_not_finite_comes_out_as_from_torch(bad, order):
    params, theirs = with_grads([1.0, bad], [2.0]), with_grads([1.0, bad], [2.0])
    total = clip_grad_norm_(params, 1.0, order, dim="global")
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, order)
    torch.testing.assert_close(total, expected, equal_nan=True)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_a_bad_gradient_leaves_the_others_alone_when_each_has_its_own_norm():
    params = with_grads([1.0, nan], [3.0, 4.0])
    clip_grad_norm_(params, 1.0, dim=None)
    assert params[0].grad.isnan().all()
    torch.testing.assert_close(params[1].grad, torch.tensor([0.6, 0.8]))


# --- dtypes and layouts


def test_mixed_dtypes_share_one_norm():
    dtypes = (torch.float16, torch.float32, torch.float64, torch.complex64)
    params = [p for d in dtypes for p in with_grads([2.0, 2.0], dtype=d)]
    total = clip_grad_norm_(params, 1.0, dim="global")
    assert total.item() == pytest.approx(math.sqrt(32))
    for p in params:
        assert p.grad[0].item() == pytest.approx(2 / math.sqrt(32), rel=1e-3)


def test_non_contiguous_gradients_are_rewritten_where_they_lie():
    room = torch.zeros(3, 4, 2)
    room[..., 0] = torch.arange(12.0).view(3, 4)
    p = torch.zeros(3, 4, requires_grad=True)
    p.grad = room[..., 0]
    norm = room.norm().item()
    assert clip_grad_norm_(p, 1.0).item() == pytest.approx(norm)
    torch.testing.assert_close(room[..., 0], torch.arange(12.0).view(3, 4) / norm)
    assert room[..., 1].count_nonzero() == 0


def test_a_sparse_gradient_is_an_error_that_names_it():
    layer = nn.Embedding(10, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    for call in (lambda p: clip_grad_norm_(p, 1.0), lambda p: clip_grad_value_(p, 1.0)):
        with pytest.raises(TypeError, match=r"sparse.*\(10, 3\).*parameter 0"):
            call(layer.parameters())


@pytest.mark.parametrize("clip", [clip_grad_value_, clip_grad_percentile_])
def test_values_of_complex_gradients_are_not_clipped(clip):
    with pytest.raises(TypeError, match="does not support complex parameters, got a parameter of"):
        clip(with_grads(torch.tensor([1j])), 1.0)


# --- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: clip_grad_norm_(p, None), ValueError, "clip_grad_norm_: pass max_norm or min"),
        (
            lambda p: clip_grad_norm_(p, 1.0, min_norm=2.0),
            ValueError,
            r"clip_grad_norm_: min_norm must be at most max_norm, got min_norm=2\.0 and max_norm=1",
        ),
        (
            lambda p: clip_grad_norm_(p, -1.0),
            ValueError,
            r"clip_grad_norm_: max_norm must be .*at least 0.*got -1\.0",
        ),
        (lambda p: clip_grad_norm_(p, nan), ValueError, "clip_grad_norm_: max_norm .*got nan"),
        (
            lambda p: clip_grad_norm_(p, 1.0, min_norm=-1.0),
            ValueError,
            "clip_grad_norm_: min_norm must be .*at least 0",
        ),
        (
            lambda p: clip_grad_norm_(p, "1"),
            TypeError,
            "clip_grad_norm_: max_norm must be a number",
        ),
        (
            lambda p: clip_grad_norm_(p, 1.0, "l5"),
            ValueError,
            "clip_grad_norm_: ord must be .*'l5'",
        ),
        (lambda p: clip_grad_norm_(p, 1.0, dim="row"), ValueError, "clip_grad_norm_: dim .*'row'"),
        (lambda p: clip_grad_norm_(p, 1.0, dim=1.0), TypeError, "clip_grad_norm_: dim .*1.0"),
        (
            lambda p: clip_grad_norm_(p, 1.0, inverse_dims=True),
            ValueError,
            "clip_grad_norm_: inverse_dims=True requires dim",
        ),
        (lambda p: clip_grad_norm_(p, 1.0, dim="layer"), ValueError, "layer"),
        (lambda p: clip_grad_value_(p, -1.0), ValueError, r"value must be .*at least 0, got -1\.0"),
        (lambda p: normalize_grads_(p, -1.0), ValueError, "norm_value must be .*at least 0"),
        (lambda p: clip_grad_percentile_(p, 101), ValueError, "percentile must be .*at most 100"),
        (lambda p: clip_grad_percentile_(p, 50, 0), ValueError, "dim must be one of .*got 0"),
    ],
)
def test_bad_arguments_are_sentences_and_change_nothing(call, error, message):
    params = with_grads([3.0, 4.0])
    with pytest.raises(error, match=message):
        call(params)
    assert params[0].grad.tolist() == [3.0, 4.0]


def test_bad_arguments_are_errors_also_without_gradients():
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_([], -1.0)


@pytest.mark.parametrize("order", [1, 2, 3, inf, 0, "std", "var", "mad", "sum"])
@pytest.mark.parametrize("dim", [None, 0, "global"])
def test_the_helper_and_the_transform_do_the_same(order, dim):
    gen = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=gen) for s in [(3, 4), (5,), (2, 2)]]
    params, others = with_grads(*grads), with_grads(*grads)
    clip_grad_norm_(params, 0.5, order, dim)
    tz.Modular(others, tz.ClipNorm(0.5, order, dim, target="grad")).step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda params: clip_grad_norm_(params, 1.0, dim="global"),
        lambda params: normalize_grads_(params, 1.0),
        lambda params: clip_grad_value_(params, 1.0),
    ],
)
def test_flat_pieces_of_fsdp1_are_refused(call):
    importlib.import_module("torch.distributed.fsdp")
    piece = nn.Parameter(torch.ones(3))
    piece.grad = torch.ones(3)
    piece._fsdp_flattened = True  # as torch marks it
    with pytest.raises(TypeError, match=r"torch\.distributed.fsdp\.fully_shard \(FSDP2\) instead"):
        call([piece])
    assert piece.grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [clip_grad_norm_, normalize_grads_])
def test_a_tag_of_a_parameter_changes_nothing(clip, dtype):
    """`grad_norm_group` is for optimizers: a function has one norm of all, as torch's has."""
    plain = with_grads([3.0, 4.0], [12.0, 0.0], dtype=dtype)
    tagged = with_grads([3.0, 4.0], [12.0, 0.0], dtype=dtype)
    vars(tagged[0])["grad_norm_group"] = "mtp"
    for params in (plain, tagged):
        assert clip(params, 1.0, dim="global").item() == 13.0
    assert all(map(torch.equal, grads_of(plain), grads_of(tagged)))
