"""`rounding=`: low-precision parameters do not lose updates smaller than their rounding."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import chain_of, prepared, saved, since_2_12
from tests.processes.launch import on_ranks
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Group,
    Guard,
    Identity,
    Modular,
    Momentum,
    Scale,
    ScheduleFree,
    State,
    TensorList,
    Transform,
    WeightDecay,
    attach,
)
from torchzero_clip.core.formats import Kahan
from torchzero_clip.core.formats.stochastic import DROPPED, ROUNDS, carried

HALF = [torch.bfloat16, torch.float16]
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of 1
COMPENSATION, (SEED, STEP) = Kahan.key, ROUNDS
inf, nan = math.inf, math.nan
HALVES = pytest.mark.parametrize("dtype", HALF)
EVERY = ("nearest", "stochastic", "kahan", "exact")
ROUNDINGS = pytest.mark.parametrize("rounding", EVERY)
CHAINS = {
    "sgd": lambda: [LR(0.01)],
    "momentum": lambda: [Momentum(0.9), LR(0.01)],
    "adamw": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(1e-3)],
}
EVERY_CHAIN = pytest.mark.parametrize("chain", CHAINS)


def params(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(s).to(torch.bfloat16).to(dtype)) for s in ((5, 7), (3,), ())]


def gradients(ps: list[Parameter], i: int) -> None:
    """Numbers that bfloat16 holds, so that every dtype gets the same."""
    generator = torch.Generator().manual_seed(i)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(opt: Modular, steps: range) -> Modular:
    for i in steps:
        gradients(opt.param_groups[0]["params"], i)
        opt.step()
    return opt


def same(a: Modular, b: Modular) -> bool:
    pairs = zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True)
    return all([p.equal(q) for p, q in pairs])


# ---------------------------------------------------------------------- what it is for


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_a_thousand_small_steps_arrive_to_one_percent(dtype):
    given, ends = list(itertools.product((1.0, 0.02), (1, -1))), {}
    for rounding in ("nearest", "stochastic", "kahan"):
        ps = [Parameter(torch.full((500,), start, dtype=dtype)) for start, _ in given]
        groups = [{"params": [p], "lr": 1e-4 * p[0].item()} for p in ps]
        opt = Modular(groups, LR(1e-4), rounding=rounding)
        for p, (_, sign) in zip(ps, given, strict=True):
            p.grad = torch.full_like(p, sign)
        for _ in range(10 if rounding == "nearest" else 1000):
            opt.step()
        ends[rounding] = [p.detach().float() for p in ps]
    for i, (start, sign) in enumerate(given):
        target = start * (1 - 0.1 * sign)
        assert (ends["nearest"][i] == torch.tensor(start, dtype=dtype)).all()  # it never moved
        assert ends["stochastic"][i].mean().item() == pytest.approx(target, rel=0.01)
        assert ends["kahan"][i][0].item() == pytest.approx(target, rel=0.01)


@HALVES
def test_kahan_stays_within_one_ulp_of_float32_weights(dtype):
    torch.manual_seed(0)
    low = Parameter(torch.randn(500).to(dtype))
    high = Parameter(low.detach().float())
    opts = [Modular([low], LR(1e-3), rounding="kahan"), torch.optim.SGD([high], lr=1e-3)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        low.grad = (torch.randn(500, generator=generator) + 0.5).to(dtype)
        high.grad = low.grad.float()
        for opt in opts:
            opt.step()
    _, exponent = torch.frexp(high.detach())
    ulp = (ULP[dtype] * 2.0 ** (exponent - 1)).clamp(min=2.0**-24)
    error = (low.detach().float() - high.detach()).abs()
    assert (error <= ulp).all()
    whole = low.detach().float() + opts[0].state[low][COMPENSATION].float()
    off = (whole - high.detach()).abs() / ulp
    assert off.median() < 1 / 32  # together they know much more


@EVERY_CHAIN
def test_the_update_is_not_rounded_on_its_way(chain):
    """One step from a fresh state is that of float32, rounded once."""
    for rounding in ("kahan", "stochastic"):
        low, high = params(), params(torch.float32)
        train(Modular(low, *CHAINS[chain](), rounding=rounding), range(1))
        train(Modular(high, *CHAINS[chain](), fused=False), range(1))
        for p, q in zip(low, high, strict=True):
            if rounding == "kahan":
                assert p.equal(q.bfloat16())
            else:
                gap = q.detach().abs().clamp(min=1e-30) * 2.0**-7
                assert ((p.detach().float() - q.detach()).abs() <= gap).all()


def test_a_chain_without_links_that_widen_is_widened_at_the_end():
    p = Parameter(torch.ones(1, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 2.0**-9)
    opt = Modular([p], Identity(), rounding="kahan")
    for _ in range(8):
        opt.step()
    assert p.item() == 1 - 8 * 2.0**-9
    assert p.grad.item() == 2.0**-9


# ---------------------------------------------------------------------- stochastic rounding


def _stochastic(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Float32 numbers at one of their two neighbours, by noise of this generator."""
    noise = torch.empty_like(x, dtype=torch.int32)
    return carried(x, noise.random_(0, 2 ** DROPPED[dtype], generator=generator), dtype)


def neighbours(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest number of `dtype` that is not above, and the smallest not below."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).double()
    every = every[~every.isnan()].unique()
    place = torch.searchsorted(every, x.double(), right=True)
    low = every[place - 1]
    return low, torch.where(low == x.double(), low, every[place.clamp(max=len(every) - 1)])


def numbers(dtype: torch.dtype) -> Tensor:
    """Numbers of every size that the dtype has, denormals among them, both signs."""
    generator = torch.Generator().manual_seed(3)
    lowest = -26 if dtype == torch.float16 else -132
    exponents = torch.arange(lowest, 15, dtype=torch.float64).repeat(40)
    x = torch.rand(len(exponents), generator=generator, dtype=torch.float64) + 1
    x = (x * 2**exponents).float()
    return torch.cat([x, -x, torch.zeros(2)])


@HALVES
def test_stochastic_rounding_gives_one_of_the_two_neighbours(dtype):
    x, generator = numbers(dtype), torch.Generator().manual_seed(0)
    low, high = neighbours(x, dtype)
    for _ in range(20):
        out = _stochastic(x, dtype, generator)
        assert out.equal(out.to(dtype).float())
        assert ((out.double() == low) | (out.double() == high)).all()


@HALVES
def test_stochastic_rounding_is_unbiased(dtype):
    """The share of draws that round up is the place between the neighbours, within 4.5 sigma."""
    x, generator, draws = numbers(dtype), torch.Generator().manual_seed(0), 2000
    low, high = neighbours(x, dtype)
    ups = torch.zeros_like(low)
    for _ in range(draws):
        ups += _stochastic(x, dtype, generator).double() != low
    gap = high - low
    share = torch.where(gap > 0, (x.double() - low) / gap, 0.0)
    sigma = (share * (1 - share) / draws).sqrt() + 2.0**-13  # float32 denormals are coarse
    z = ((ups / draws - share) / sigma).abs()
    assert (z < 4.5).all()
    assert (z > 2).double().mean() < 0.08  # and they scatter as they should


@HALVES
def test_stochastic_rounding_leaves_exact_values_and_what_is_no_number(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype)
    out = _stochastic(every.float(), dtype, generator).to(dtype)
    assert out[~every.isnan()].equal(every[~every.isnan()])  # infinities among them
    assert out[every.isnan()].isnan().all()
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32)
    assert _stochastic(payloads.view(torch.float32), dtype, generator).isnan().all()


def test_draws_differ_by_step_parameter_and_entry():
    ps = [Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2)]
    opt = Modular([{"params": ps[:1]}, {"params": ps[1:]}], LR(2.0**-9), rounding="stochastic")
    draws = []
    for _ in range(2):
        for p in ps:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        opt.step()
        draws += [(p.detach() < 1).float() for p in ps]
    for a in draws:
        assert a.mean().item() == pytest.approx(0.5, abs=0.04)  # 2^-9 is half of the step below 1
    corr = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert corr.abs().max() < 0.07
    assert torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1].abs() < 0.07


def test_runs_draw_by_their_seed_which_a_checkpoint_keeps():
    def run(seed, steps=4, held=None):
        w = Parameter(torch.ones(500, dtype=torch.bfloat16))
        opt = Modular([w], LR(2.0**-9), rounding="stochastic")
        opt.init_state()
        if held is None:
            opt.param_groups[0]["chain"][SEED] = seed
        else:
            w.data.copy_(held[0])
            opt.load_state_dict(held[1])
        for _ in range(steps):
            w.grad = torch.ones_like(w)
            opt.step()
        return w.detach().clone(), opt.state_dict()

    plain, seven = run(0), run(7)
    assert torch.equal(seven[0], run(7)[0])
    same = (plain[0] == seven[0]).float().mean().item()
    assert same < 0.6  # of five values that are likely, two draws agree in less than a third
    assert torch.equal(run(None, 2, run(7, 2))[0], seven[0])


# ---------------------------------------------------------------------- who is concerned


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_CHAIN
def test_wider_parameters_take_the_plain_path(chain, dtype, rounding):
    a = train(Modular(params(dtype), *CHAINS[chain]()), range(4))
    b = train(Modular(params(dtype), *CHAINS[chain](), rounding=rounding), range(4))
    assert same(a, b)
    for ours, theirs in zip(a.param_groups, b.param_groups, strict=True):
        assert ours["chain"].keys() == theirs["chain"].keys()
        assert all([same_value(v, theirs["chain"][k]) for k, v in ours["chain"].items()])
    assert not any([COMPENSATION in held for held in b.state.values()])


def same_value(a: object, b: object) -> bool:
    return torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_model_may_mix_dtypes():
    ps = [Parameter(torch.ones(3, dtype=t)) for t in (torch.bfloat16, torch.float32)]
    opt = Modular(ps, ClipNorm(1e9), LR(1e-4), rounding="kahan")
    for _ in range(100):
        for p in ps:
            p.grad = torch.ones_like(p)
        opt.step()
    assert ps[0][0].item() == pytest.approx(0.99, rel=0.003)
    assert ps[1][0].item() == pytest.approx(0.99, rel=1e-5)
    assert opt.state[ps[0]][COMPENSATION].dtype == torch.bfloat16
    assert not opt.state[ps[1]]


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@EVERY_CHAIN
def test_no_fused_kernel_takes_what_is_to_be_rounded(chain, rounding, monkeypatch):
    runs = [
        train(Modular(params(), *CHAINS[chain](), rounding=rounding, fused=fused), range(5))
        for fused in (False, True)
    ]
    assert same(*runs)
    for name in ("_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, name, lambda *args, **kw: pytest.fail("a kernel ran"))
    train(Modular(params(), *CHAINS[chain](), rounding=rounding), range(1))


@ROUNDINGS
def test_the_state_of_other_links_is_not_written(rounding):
    """The update of Momentum is its buffer."""
    ps = params()
    opt = Modular(ps, Momentum(0.5), rounding=rounding)
    gradients(ps, 0)
    first = [p.grad.float() for p in ps]
    opt.step()
    for p, g in zip(ps, first, strict=True):
        assert opt.state[p]["Momentum/momentum_buffer"].equal(g)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_layouts_do_not_matter(rounding):
    a = Parameter(torch.randn(6, 4).bfloat16())
    b = Parameter(a.detach().t().contiguous().t())
    empty = Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))
    opts = [Modular([p, empty], Momentum(), LR(1e-3), rounding=rounding) for p in (a, b)]
    for i in range(5):
        g = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).bfloat16()
        a.grad, b.grad, empty.grad = g, g.clone(), torch.zeros_like(empty)
        for opt in opts:
            opt.step()
    if rounding == "kahan":
        assert a.equal(b)
    else:  # the draws go through memory
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


ENGINES = {"unfused": {"fused": False}, "default": {}, "compiled": {"compile": True}}


class AddTenthOfGradient(Transform):
    """u + 0.1 g"""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["grads"], alpha=0.1)


MIXED_DTYPES = {
    "parameters in an average": lambda: [LR(0.01), ScheduleFree()],
    "gradients added": lambda: [Scale(0.3), AddTenthOfGradient(), LR(0.1)],
}
"""Chains that add a float32 list and a multiple of a list in half precision."""


def with_gaps() -> list[Any]:
    """Cases in every engine; of compiled steps one chain for each rounding is quick."""
    cases = []
    for engine, chain, rounding in itertools.product(
        ENGINES, MIXED_DTYPES, ("exact", "stochastic", "kahan")
    ):
        slow = engine == "compiled" and (chain == "gradients added") != (rounding == "exact")
        marks = pytest.mark.slow if slow else ()
        cases.append(pytest.param(engine, chain, rounding, torch.bfloat16, marks=marks))
        if rounding != "exact":
            half = pytest.param(engine, chain, rounding, torch.float16, marks=pytest.mark.slow)
            cases.append(half)
    return cases


@pytest.mark.parametrize(("engine", "chain", "rounding", "dtype"), with_gaps())
def test_parameters_with_gaps_in_memory_become_what_contiguous_ones_become(
    engine: str, chain: str, rounding: str, dtype: torch.dtype
) -> None:
    """Kernels skip memory with gaps, so that PyTorch computes there."""
    torch.manual_seed(0)
    start = torch.randn(6, 8).to(dtype)
    contiguous, gaps = Parameter(start.clone()), Parameter(torch.zeros(6, 10, dtype=dtype)[:, :8])
    with torch.no_grad():
        gaps.copy_(start)
    opts = [
        Modular([p], *MIXED_DTYPES[chain](), rounding=rounding, **ENGINES[engine])
        for p in (contiguous, gaps)
    ]
    for i in range(6):
        gradient = torch.randn(6, 8, generator=torch.Generator().manual_seed(i)).to(dtype)
        contiguous.grad, gaps.grad = gradient, gradient.t().contiguous().t()
        for opt in opts:
            opt.step()
        assert gaps.equal(contiguous), f"step {i}"
    for name, held in opts[0].state[contiguous].items():
        assert torch.equal(opts[1].state[gaps][name], held), name


# ---------------------------------------------------------------------- trouble


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_kahan_takes_no_trouble_into_its_memory(bad):
    p = Parameter(torch.ones(2, dtype=torch.bfloat16))
    opt = Modular([p], LR(1e-4), rounding="kahan")
    p.grad = torch.tensor([bad, 1.0], dtype=torch.bfloat16)
    opt.step()
    assert not p[0].isfinite()
    p.data[0] = 1.0  # somebody repairs the weight
    for _ in range(999):
        p.grad = torch.ones_like(p)
        opt.step()
    assert p.tolist() == pytest.approx([0.9, 0.9], rel=0.01)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_skipped_step_leaves_no_trace(rounding):
    runs = []
    for spoil in (True, False):
        ps = params()
        opt = Modular(ps, Guard(), Adam(), LR(1e-3), rounding=rounding)
        for i in range(6):
            if spoil and i in (0, 3):
                gradients(ps, 100)
                ps[0].grad[0, 0] = nan
                opt.step()
            train(opt, range(i, i + 1))
        runs.append(opt)
    assert same(*runs)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_a_parameter_without_gradient_is_not_touched(rounding):
    ps = params()
    opt = Modular(ps, LR(1e-3), rounding=rounding)
    ps[0].grad = torch.ones_like(ps[0])
    before = ps[1].detach().clone()
    opt.step()
    assert ps[1].equal(before)
    assert ps[1] not in opt.state or not opt.state[ps[1]]


# ---------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
@EVERY_CHAIN
@HALVES
def test_a_resumed_run_is_the_run_that_went_on(dtype, chain, rounding):
    whole = train(Modular(params(dtype), *CHAINS[chain](), rounding=rounding), range(5))
    later = params(dtype)
    for p, q in zip(later, whole.param_groups[0]["params"], strict=True):
        p.data.copy_(q)
    resumed = Modular(later, *CHAINS[chain](), rounding=rounding)
    resumed.load_state_dict(saved(whole.state_dict()))
    for p, q in zip(later, whole.param_groups[0]["params"], strict=True):
        assert resumed.state[p].keys() == whole.state[q].keys()
        for key, value in whole.state[q].items():
            assert resumed.state[p][key].dtype == value.dtype
            assert resumed.state[p][key].equal(value)
    assert same(train(resumed, range(5, 12)), train(whole, range(5, 12)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
@ROUNDINGS
def test_copies_keep_it(rounding, copied):
    opt = train(Modular(params(), Adam(), LR(1e-3), rounding=rounding), range(3))
    other = copied(opt)
    assert other.rounding == rounding
    assert same(train(other, range(3, 8)), train(opt, range(3, 8)))
    assert (f"rounding={rounding!r}" in repr(other)) == (rounding != "nearest")


ENDS = {
    ("nearest", "kahan"): "the compensation starts at zero",
    ("stochastic", "kahan"): "the compensation starts at zero",
    ("kahan", "nearest"): "the saved compensation is dropped",
    ("kahan", "stochastic"): "the saved compensation is dropped",
    ("nearest", "stochastic"): "rounding='stochastic'",
    ("stochastic", "nearest"): "rounding='nearest'",
}


@pytest.mark.parametrize(("before", "after"), ENDS)
def test_the_rounding_may_change_with_a_warning(before, after):
    opt = train(Modular(params(), Adam(), LR(1e-3), rounding=before), range(3))
    other = Modular(params(), Adam(), LR(1e-3), rounding=after)
    with pytest.warns(UserWarning, match=ENDS[before, after]):
        other.load_state_dict(saved(opt.state_dict()))
    fresh = Modular(params(), Adam(), LR(1e-3), rounding=after)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = train(Modular(params(), Adam(), LR(1e-3)), range(3))
        fresh.load_state_dict(saved(plain.state_dict()))
    # what was dropped is gone, so that it is as if a plain run had been continued
    held, plain_held = other.state_dict(), fresh.state_dict()
    assert held["state"].keys() == plain_held["state"].keys()
    assert all(COMPENSATION not in row for row in held["state"].values())
    assert all(STEP not in group["chain"] for group in held["param_groups"])
    train(other, range(3, 6))
    assert other.state_dict()["state"][0].keys() >= {"Adam/exp_avg"}


def test_equal_roundings_and_untrained_checkpoints_load_without_a_word():
    for rounding in ("nearest", "stochastic", "kahan"):
        for steps in (range(0), range(3)):
            opt = train(Modular(params(), Adam(), LR(1e-3), rounding=rounding), steps)
            Modular(params(), Adam(), LR(1e-3), rounding=rounding).load_state_dict(
                saved(opt.state_dict())
            )
    fresh = Modular(params(), Adam(), LR(1e-3))
    again = Modular(params(), Adam(), LR(1e-3), rounding="kahan")
    again.load_state_dict(saved(fresh.state_dict()))


def test_float32_parameters_take_no_compensation():
    low = train(Modular(params(), LR(1e-3), rounding="kahan"), range(2))
    high = Modular(params(torch.float32), LR(1e-3), rounding="kahan")
    with pytest.warns(UserWarning, match="dropped"):
        high.load_state_dict(saved(low.state_dict()))
    assert not any(high.state.values())


@pytest.mark.parametrize("value", [torch.zeros(5, 7), torch.zeros(2).bfloat16(), 0.5])
def test_a_compensation_of_another_kind_is_refused(value):
    opt = train(Modular(params(), LR(1e-3), rounding="kahan"), range(2))
    held = saved(opt.state_dict())
    held["state"][0][COMPENSATION] = value
    before = saved(opt.state_dict())["state"][0][COMPENSATION]
    with pytest.raises(ValueError, match=f"has .*{COMPENSATION}. of parameter 0"):
        opt.load_state_dict(held)
    assert opt.state_dict()["state"][0][COMPENSATION].equal(before)


def test_a_number_stands_for_a_tensor_without_dimensions():
    opt = train(Modular(params(), LR(1e-3), rounding="kahan"), range(2))
    held = saved(opt.state_dict())
    held["state"][2][COMPENSATION] = 0.25
    opt.load_state_dict(held)
    assert opt.state[opt.param_groups[0]["params"][2]][COMPENSATION].equal(
        torch.tensor(0.25, dtype=torch.bfloat16)
    )


def test_a_number_stands_for_the_count_of_draws():
    opt = train(Modular(params(), LR(1e-3), rounding="stochastic"), range(2))
    held = saved(opt.state_dict())
    for group in held["param_groups"]:
        group["chain"]["rounding/step"] = int(group["chain"]["rounding/step"])
    values = [p.detach().clone() for p in opt.param_groups[0]["params"]]
    other = Modular([torch.nn.Parameter(x) for x in values], LR(1e-3), rounding="stochastic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(held)
    assert same(train(other, range(2, 6)), train(opt, range(2, 6)))


def test_state_can_be_made_early():
    ps = params()
    opt = Modular(ps, LR(1e-3), rounding="kahan")
    opt.init_state()
    assert [opt.state[p][COMPENSATION].shape for p in ps] == [p.shape for p in ps]
    assert same(
        train(opt, range(4)), train(Modular(params(), LR(1e-3), rounding="kahan"), range(4))
    )


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize("value", ["up", "", True, 3, ["kahan"]])
def test_another_rounding_is_a_sentence(value):
    with pytest.raises(ValueError, match=r"Modular: rounding must be one of .*'kahan'.*, got"):
        Modular(params(), LR(1e-3), rounding=value)


def test_attach_takes_no_rounding():
    with pytest.raises(TypeError, match="rounding"):
        attach(torch.optim.SGD(params()), ClipNorm(1.0), rounding="kahan")


# ---------------------------------------------------------------------- compiled


ROUNDINGS_COMPILED = [
    ("stochastic", "eager"),
    pytest.param("exact", "eager", marks=pytest.mark.slow),
    *[pytest.param(x, "aot_eager", marks=pytest.mark.slow) for x in EVERY],
]


@pytest.mark.parametrize(("rounding", "backend"), ROUNDINGS_COMPILED)
def test_a_compiled_step_is_the_eager_step(rounding, backend):
    torch._dynamo.reset()
    opts = [
        Modular(params()[:2], Adam(), LR(torch.tensor(1e-3)), rounding=r)
        for r in (rounding, rounding)
    ]
    for opt in opts:
        opt.init_state()
    step = torch.compile(opts[1].step, backend=backend)
    for i in range(4):
        for opt, go in zip(opts, (opts[0].step, step), strict=True):
            gradients(opt.param_groups[0]["params"], i)
            go()
    for p, q in zip(*[opt.param_groups[0]["params"] for opt in opts], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
    torch._dynamo.reset()


@since_2_12
@pytest.mark.parametrize(
    "rounding",
    [
        pytest.param("nearest", marks=pytest.mark.slow),
        pytest.param("stochastic", marks=pytest.mark.slow),  # the test above has a quick one
        "kahan",
        "exact",
    ],
)
def test_the_chain_with_its_rounding_is_one_graph(rounding):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    ps = params()
    opt = Modular(ps, Adam(), LR(torch.tensor(1e-3)), rounding=rounding)
    other = Modular(params(), Adam(), LR(torch.tensor(1e-3)), rounding=rounding)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(chain_of(opt), fullgraph=True, backend=counter)
    for i in range(4):
        gradients(ps, i)
        with torch.no_grad():
            run(prepared(opt))
    train(other, range(4))
    for p, q in zip(ps, other.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
    assert counter.frame_count == 1
    torch._dynamo.reset()


# ---------------------------------------------------------------------- longer checks


@pytest.mark.slow
def test_a_language_model_in_pure_bfloat16_ends_where_float32_ends():
    from benchmarks.studies.rounding import RUNS, language_model

    ends = {
        name: torch.tensor([language_model(*run, seed=seed) for seed in range(3)])
        for name, run in RUNS.items()
    }
    exact = ends["float32"]
    noise = (exact.max() - exact.min()).item()
    for name in ("bfloat16, kahan", "bfloat16, stochastic"):
        assert (ends[name] - exact).abs().max() < noise
    assert (ends["bfloat16, nearest"] - exact).min() > 3 * noise


WORLD = 2
SHARDED = ["kahan follows one process", "kahan resumes", "shards differ", "replicas agree"]


def sharded_main() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (WORLD,))

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
        return torch.nn.Sequential(*layers).bfloat16()

    def run(net: torch.nn.Module, opt: Modular, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            x = torch.randn(8, 5).bfloat16()
            opt.zero_grad()
            net(x).float().square().mean().backward()
            opt.step()

    def alike(a: torch.nn.Module, b: torch.nn.Module) -> None:
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            wholes = [t.full_tensor() if isinstance(t, DTensor) else t for t in (p, q)]
            torch.testing.assert_close(*wholes, rtol=0, atol=0)

    one, two, again = model(), model(), model()
    for net in (two, again):
        fully_shard(net, mesh=mesh)
    opts = [
        Modular(net.parameters(), Adam(), LR(1e-4), rounding="kahan") for net in (one, two, again)
    ]
    for net, opt in zip((one, two), opts, strict=False):
        run(net, opt, range(10))
    alike(one, two)
    assert isinstance(opts[1].state[next(two.parameters())][COMPENSATION], DTensor)
    print(SHARDED[0], flush=True)

    again.load_state_dict(two.state_dict())
    opts[2].load_state_dict(copy.deepcopy(opts[1].state_dict()))
    for net, opt in zip((one, two, again), opts, strict=True):
        run(net, opt, range(10, 20))
    alike(one, again)
    print(SHARDED[1], flush=True)

    for placement, word in ((Shard(0), SHARDED[2]), (Replicate(), SHARDED[3])):
        ones = torch.ones(2000, dtype=torch.bfloat16)
        p = Parameter(distribute_tensor(ones, mesh, [placement]))
        opt = Modular([p], LR(2.0**-9), rounding="stochastic")
        p.grad = distribute_tensor(ones, mesh, [placement])
        opt.step()
        mine = p.to_local().detach().float()
        both = [torch.empty_like(mine) for _ in range(WORLD)]
        dist.all_gather(both, mine)
        assert 0.4 < (mine < 1).float().mean() < 0.6
        assert both[0].equal(both[1]) == placement.is_replicate()
        print(word, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


@pytest.mark.slow  # processes and sockets have no place among the quick tests
def test_sharded_parameters_are_rounded_alike():
    for out in on_ranks(WORLD, __file__):
        assert out.splitlines() == SHARDED


if __name__ == "__main__":
    sharded_main()
