"""`rounding="exact"`: float32 weights behind bfloat16 are those of a float32 model, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter, Sequential

import torchzero_clip as tz
from tests.engines.accelerated import as_on_an_accelerator
from tests.helpers import at_once, saved
from tests.table import Case, sampled
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Guard,
    Modular,
    Momentum,
    ScheduleFree,
    WeightDecay,
    WeightEMA,
    ZClip,
    named,
    release,
)
from torchzero_clip.core.formats import Exact, Kahan, lower, upper, wide_of
from torchzero_clip.optimizer.rounding import weights_of

FOR = {"muon": ((60, 30), (30, 60), (20, 20))}
SMALL = ((30, 70), (33,), (), (5, 4, 3), (0, 4))
SHAPES = (*SMALL, (300, 70), (2**12, 80))
inf, nan = math.inf, math.nan


CHAINS: dict[str, Callable[[], list[Any]]] = {
    "adamw": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(1e-3)],
    "sgd": lambda: [ClipNorm(0.5, dim="global"), Momentum(0.9), LR(1e-2)],
    "lamb": lambda: list(named("lamb", lr=1e-3)),
    "muon": lambda: list(named("muon", lr=1e-2)),
    "schedule-free": lambda: [Adam(), LR(1e-3), ScheduleFree()],
    "zclip": lambda: [Guard(), ZClip(), Adam(), LR(1e-3)],
    "ema": lambda: [Adam(), WeightDecay(0.1), LR(1e-2), WeightEMA(0.9)],
}
ENGINES = {"default": {}, "plain": {"fused": False}, "compiled": {"compile": True}}
EVERY_CHAIN = pytest.mark.parametrize("chain", CHAINS)
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)


def model(dtype: torch.dtype, shapes: Any = SHAPES) -> list[Parameter]:
    """The same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]
    return list(map(Parameter, made))


def gradients(low: list[Parameter], high: list[Parameter], i: int) -> None:
    """Gradients in bfloat16, the same in float32; in some steps one is missing."""
    generator = torch.Generator().manual_seed(i)
    for k, (p, q) in enumerate(zip(low, high, strict=True)):
        size = 1e3 if i % 7 == 3 else 1.0
        grad = (size * torch.randn(p.shape, generator=generator)).bfloat16()
        p.grad = None if i % 5 == 4 and k == 1 else grad
        q.grad = None if p.grad is None else grad.float()


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int32)


class Twins:
    """The same chain on bfloat16 with exact weights, and on float32."""

    def __init__(self, chain: Callable[[], Any], shapes: Any = SHAPES, **options: Any) -> None:
        self.low, self.high = model(torch.bfloat16, shapes), model(torch.float32, shapes)
        named = [[(f"layer{i}.weight", p) for i, p in enumerate(x)] for x in (self.low, self.high)]
        self.exact = Modular(named[0], *chain(), rounding="exact", **options)
        self.whole = Modular(named[1], *chain(), **options)

    def step(self, i: int) -> None:
        gradients(self.low, self.high, i)
        for opt in (self.exact, self.whole):
            for group in opt.param_groups:
                if "lr" in group:
                    group["lr"] *= 0.999  # a schedule
            opt.step()

    def agree(self) -> None:
        for p, q in zip(self.low, self.high, strict=True):
            ours = weights_of(self.exact, p)
            assert bits(ours)[~q.detach().isnan()].equal(bits(q)[~q.detach().isnan()])
            assert p.isnan().equal(q.isnan())
            assert p.detach().nan_to_num(1.0).equal(upper(q.detach()).nan_to_num(1.0))
            state = self.whole.state[q]
            for key, value in self.exact.state[p].items():
                if key != Exact.key:
                    assert getattr(value, "dtype", None) == getattr(state[key], "dtype", None), key
                    torch.testing.assert_close(value, state[key], rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------- the two halves


def test_the_halves_are_float32_and_the_upper_one_is_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (10**6,), generator=generator, dtype=torch.int64)
    x = any_bits.to(torch.int32).view(torch.float32)
    x = x[~x.isnan()]
    assert bits(wide_of(upper(x), lower(x))).equal(bits(x))
    away = (upper(x).double() - x.double()).abs()
    near = (x.bfloat16().double() - x.double()).abs()
    fits = upper(x).isfinite() & x.bfloat16().isfinite()
    assert away[fits].equal(near[fits])  # ties go the other way, as far


def test_ties_go_away_from_zero_and_too_large_numbers_show_as_infinity() -> None:
    x = torch.tensor([1 + 2.0**-8, -1 - 2.0**-8, 3.4e38, -3.4e38, inf, -0.0, 1e-45])
    expected = torch.tensor([1 + 2.0**-7, -1 - 2.0**-7, inf, -inf, inf, -0.0, 0.0])
    assert bits(upper(x).float()).equal(bits(expected))
    assert bits(wide_of(upper(x), lower(x))).equal(bits(x))
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert upper(odd).view(torch.int16).tolist() == [0x7FC0] * 3
    assert lower(odd).tolist() == [0] * 3


def test_a_lower_half_that_cannot_be_ours_counts_as_none() -> None:
    w = torch.tensor([0.0, -0.0, 0.0, -0.0, inf, -inf, inf, nan, 1.0], dtype=torch.bfloat16)
    rest = torch.tensor([-1, -1, 3, 3, 1, 7, -1, 5, -5], dtype=torch.int16)
    denormal, large = 3 * 2.0**-149, torch.finfo(torch.float32).max
    expected = [0.0, -0.0, denormal, -denormal, inf, -inf, large, nan, 1 - 5 * 2.0**-24]
    wide = wide_of(w, rest)
    assert wide.isnan().tolist() == [x != x for x in expected]
    assert bits(wide)[:7].equal(bits(torch.tensor(expected))[:7])
    assert wide[8] == torch.tensor(0x3F800000 - 5, dtype=torch.int32).view(torch.float32)


# ---------------------------------------------------------------------- float32, bit for bit


QUICK = [
    ("adamw", "default"),
    ("adamw", "compiled"),
    ("sgd", "plain"),
    ("lamb", "default"),
    ("muon", "plain"),
    ("schedule-free", "default"),
    ("zclip", "compiled"),
    ("ema", "default"),
]


@pytest.mark.parametrize(
    ("chain", "engine"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in product(CHAINS, ENGINES)
    ],
)
def test_it_is_float32_bit_for_bit(chain: str, engine: str) -> None:
    is_large = (chain, engine) not in QUICK or chain == "adamw"
    twins = Twins(CHAINS[chain], FOR.get(chain, SHAPES if is_large else SMALL), **ENGINES[engine])
    for i in range(20 if is_large else 12):
        twins.step(i)
        twins.agree()
    if engine == "compiled":
        assert twins.exact.engine.replays.count == twins.whole.engine.replays.count


@pytest.mark.slow
@EVERY_ENGINE
@EVERY_CHAIN
def test_it_is_float32_after_ten_thousand_steps(chain: str, engine: str) -> None:
    twins = Twins(CHAINS[chain], FOR.get(chain, ((70, 30), (33,), ())), **ENGINES[engine])
    for i in range(10**4):
        twins.step(i)
        if i % 500 == 499:
            twins.agree()


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(chain, marks=() if chain in ("adamw", "zclip", "ema") else pytest.mark.slow)
        for chain in CHAINS
    ],
)
def test_on_an_accelerator_as_well(chain: str) -> None:
    with as_on_an_accelerator():
        twins = Twins(CHAINS[chain], FOR.get(chain, SMALL))
        for i in range(8):
            twins.step(i)
            twins.agree()


@pytest.mark.parametrize(
    "engine",
    ["default", *[pytest.param(x, marks=pytest.mark.slow) for x in ("plain", "compiled")]],
)
@sampled(one_in=3)
def test_of_every_construction(case: Case, engine: str) -> None:
    def chain() -> list[Any]:
        made, rated = case.make(), any(["lr" in tfm.live for tfm in case.make().walk()])
        return [made] if rated else [LR(1e-2), made] if made.place == "step" else [made, LR(1e-2)]

    if case.make().target == "grad":
        pytest.skip("what it writes is in bfloat16")
    twins = Twins(chain, [tuple(shape) for shape in case.shapes.values()], **ENGINES[engine])
    for i in range(6):
        twins.step(i)
    twins.agree()


def test_a_gradient_that_a_rule_writes_is_rounded_and_nothing_else() -> None:
    p, q = model(torch.bfloat16, [(40, 30)])[0], model(torch.float32, [(40, 30)])[0]
    exact = Modular([p], ClipNorm(0.5, target="grad"), Adam(), LR(1e-3), rounding="exact")
    whole = Modular([q], Adam(), LR(1e-3))
    for i in range(5):
        gradients([p], [q], i)
        exact.step()
        assert p.grad is not None
        assert p.grad.dtype == torch.bfloat16
        q.grad = p.grad.float()  # as the rule has left it
        whole.step()
        assert bits(weights_of(exact, p)).equal(bits(q))


def test_links_see_float32() -> None:
    """Also those that keep no state, and a class of a user's own."""
    seen = []

    class Sees(tz.Transform):
        def update(self, u: Any, state: Any, group: Any) -> Any:
            seen.append((u.dtype, group["params"].dtype, group["params"].tensors[0].clone()))
            return u

    for options in ENGINES.values():
        twins = Twins(lambda: [Sees(), LR(1e-2)], [(5, 3)], **options)
        for i in range(3):
            twins.step(i)
    for ours, theirs in zip(seen[::2], seen[1::2], strict=True):
        assert ours[:2] == theirs[:2] == (torch.float32, torch.float32)
        assert ours[2].equal(theirs[2])


def test_matrices_in_bfloat16_and_norms_in_float32_share_a_chain() -> None:
    low, high = model(torch.bfloat16, [(40, 30)]), model(torch.float32, [(40, 30)])
    norms = [Parameter(torch.ones(30)) for _ in range(2)]
    exact = Modular([*low, norms[0]], *CHAINS["adamw"](), rounding="exact")
    whole = Modular([*high, norms[1]], *CHAINS["adamw"]())
    for i in range(5):
        gradients(low, high, i)
        for norm in norms:
            norm.grad = torch.full_like(norm, 0.1 * i)
        exact.step()
        whole.step()
    assert bits(weights_of(exact, low[0])).equal(bits(high[0]))
    assert norms[0].equal(norms[1])
    assert Exact.key not in exact.state[norms[0]]


def test_layouts_do_not_matter() -> None:
    base = torch.randn(8, 6, 4, 4).bfloat16()
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.clone(),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ]
    ends = []
    for form in forms:
        for options in ENGINES.values():
            p = Parameter(form(base))
            opt = Modular([p], Adam(), WeightDecay(0.1), LR(1e-2), rounding="exact", **options)
            for i in range(5):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
                opt.step()
            ends.append(weights_of(opt, p))
    for end in ends:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------- written by somebody else


@EVERY_ENGINE
@at_once("value", [0.0, -0.0, 1.5, inf, -inf, nan])
def test_what_somebody_writes_into_a_weight_counts(value: float, engine: str) -> None:
    twins = Twins(CHAINS["adamw"], [(40, 30)], **ENGINES[engine])
    (p,), (q,) = twins.low, twins.high
    for i in range(4):
        twins.step(i)
    kept = twins.exact.state[p][Exact.key].clone()
    with torch.no_grad():
        p[:20] = value  # all of a row, as a mask does
        q.copy_(wide_of(p, kept))
    off = (q.detach() - value).abs()[:20]
    assert value - value != 0 or (off <= 2.0**-8 * (value != 0) + 2.0**-133).all()
    for i in range(4, 9):
        twins.step(i)
        assert bits(weights_of(twins.exact, p)).equal(bits(torch.where(q.isnan(), nan, q)))
        assert p.isfinite().equal(upper(q.detach()).isfinite())


def test_a_weight_beyond_bfloat16_shows_as_infinite_and_comes_back() -> None:
    p = Parameter(torch.tensor([3.38e38]).bfloat16())
    opt = Modular([p], LR(1.0), rounding="exact")
    steps = [-2e36, 2e36]
    shown = []
    for step in steps:
        p.grad = torch.tensor([step]).bfloat16()
        opt.step()
        shown.append((p.item(), weights_of(opt, p).isfinite().item()))
    assert shown[0] == (inf, True)
    assert shown[1][0] == torch.tensor([3.38e38]).bfloat16().item()


@EVERY_ENGINE
def test_a_skipped_step_leaves_no_trace(engine: str) -> None:
    runs = []
    for spoil in (True, False):
        low, high = model(torch.bfloat16, SMALL), model(torch.float32, SMALL)
        opt = Modular(low, Guard(), *CHAINS["adamw"](), rounding="exact", **ENGINES[engine])
        for i in range(8):
            if spoil and i in (0, 5):
                gradients(low, high, 100)
                assert low[0].grad is not None
                low[0].grad[0, 0] = nan
                opt.step()
            gradients(low, high, i)
            opt.step()
        runs.append([weights_of(opt, p) for p in low])
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6 * (engine == "compiled"), atol=0)


def test_an_error_within_a_step_leaves_weights_and_halves() -> None:
    class Fails(tz.Transform):
        def update(self, u: Any, state: Any, group: Any) -> Any:
            raise RuntimeError("on purpose")

    for options in ENGINES.values():
        p = model(torch.bfloat16, [(5,)])[0]
        opt = Modular([p], Adam(), LR(1e-3), Fails(), rounding="exact", **options)
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        with pytest.raises(RuntimeError, match="on purpose"):
            opt.step()
        assert p.equal(before)
        assert not opt.state[p].get(Exact.key, torch.zeros(1)).any()


# ---------------------------------------------------------------------- saving and loading


@pytest.mark.parametrize(
    ("chain", "engine"),
    [
        ("adamw", "default"),
        ("muon", "default"),
        ("schedule-free", "default"),
        ("zclip", "default"),
        ("zclip", "compiled"),
        ("schedule-free", "compiled"),
        pytest.param("adamw", "compiled", marks=pytest.mark.slow),
        pytest.param("muon", "compiled", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_run_that_went_on(chain: str, engine: str) -> None:
    shapes = FOR.get(chain, SMALL)

    def trained(low: list[Parameter], steps: range, held: Any = None) -> Modular:
        opt = Modular(low, *CHAINS[chain](), rounding="exact", **ENGINES[engine])
        if held is not None:
            opt.load_state_dict(copy.deepcopy(held))
        for i in steps:
            gradients(low, model(torch.float32, shapes), i)
            opt.step()
        return opt

    first = model(torch.bfloat16, shapes)
    half = trained(first, range(6))
    held, weights = saved(half.state_dict()), [p.detach().clone() for p in first]
    later = model(torch.bfloat16, shapes)
    for p, w in zip(later, weights, strict=True):
        p.data.copy_(w)
    ours, theirs = trained(later, range(6, 12), held), trained(first, range(6, 12), held)
    for p, q in zip(later, first, strict=True):
        assert bits(weights_of(ours, p)).equal(bits(weights_of(theirs, q)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_keep_it(copied: Any) -> None:
    twins = Twins(CHAINS["adamw"], SMALL)
    for i in range(3):
        twins.step(i)
    twins.exact = copied(twins.exact)
    twins.low = twins.exact.param_groups[0]["params"]
    for i in range(3, 6):
        twins.step(i)
        twins.agree()
    assert "rounding='exact'" in repr(twins.exact)


def small(rounding: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Modular]:
    torch.manual_seed(0)
    net = Sequential(Linear(6, 5), Linear(5, 4)).to(dtype)
    return net, Modular(net.parameters(), Adam(), LR(1e-3), rounding=rounding)


def trained(net: Any, opt: Modular, steps: range = range(5)) -> None:
    for i in steps:
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.dtype)
        opt.step()


CHANGES = {
    ("nearest", "exact"): "the float32 weights start at the bfloat16 weights",
    ("stochastic", "exact"): "the float32 weights start at the bfloat16 weights",
    ("kahan", "exact"): "the compensation of 'kahan' is added to the float32 weights",
    ("exact", "nearest"): "the float32 weights are rounded to bfloat16",
    ("exact", "kahan"): "the float32 weights are rounded to bfloat16",
    ("exact", "stochastic"): "the float32 weights are rounded to bfloat16",
}


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_the_rounding_may_change_with_a_warning(before: str, after: str) -> None:
    (net, opt), (other, later) = small(before), small(after)
    trained(net, opt)
    other.load_state_dict(net.state_dict())
    with pytest.warns(UserWarning, match=CHANGES[before, after]):
        later.load_state_dict(saved(opt.state_dict()))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        known = opt.state[p].get(Kahan.key, torch.zeros(())).float()
        expected = p.float() + known if before == "kahan" else p.float()
        assert weights_of(later, q).float().equal(expected)
        assert (Exact.key in later.state[q]) == (before == "kahan")
    trained(other, later, range(5, 7))


def test_a_state_dict_in_float32_and_back() -> None:
    net, opt = small("exact")
    trained(net, opt)
    whole = opt.exact_state_dict(net)
    assert {t.dtype for t in whole.values()} == {torch.float32}
    assert all([upper(whole[k]).equal(t) for k, t in net.state_dict().items()])
    other, later = small("exact")
    later.load_exact(other, saved(whole))
    later.load_state_dict(saved(opt.state_dict()))
    assert all([t.equal(whole[k]) for k, t in later.exact_state_dict(other).items()])
    trained(net, opt, range(5, 9))
    trained(other, later, range(5, 9))
    ours, theirs = opt.exact_state_dict(net), later.exact_state_dict(other)
    assert all([t.equal(theirs[k]) for k, t in ours.items()])


SENT = {"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
"""The dtypes that both NCCL and gloo send; neither sends 16-bit integers."""


@EVERY_ENGINE
def test_every_tensor_of_a_state_dict_can_be_sent_between_ranks(engine: str) -> None:
    forms = torch.randn(4, 3), torch.randn(()), torch.randn(2, 6, 4, 4), torch.randn(0, 4)
    params = [Parameter(t.bfloat16()) for t in forms]
    params[2] = Parameter(params[2].detach().to(memory_format=torch.channels_last))
    opt = Modular(params, Adam(), LR(1e-2), rounding="exact", **ENGINES[engine])
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    before = [weights_of(opt, p).clone() for p in params]
    state = opt.state_dict()["state"]
    dtypes = {str(t.dtype).removeprefix("torch.") for held in state.values() for t in held.values()}
    assert dtypes <= SENT
    assert [tuple(state[i][Exact.key].shape) for i in range(4)] == [(*t.shape, 2) for t in forms]
    assert all([opt.state[p][Exact.key].dtype == torch.int16 for p in params])  # as it was
    opt.load_state_dict(saved(opt.state_dict()))
    assert all(map(torch.equal, before, [weights_of(opt, p) for p in params]))
    assert all([opt.state[p][Exact.key].shape == p.shape for p in params])


def test_a_float32_parameter_next_to_bfloat16_ones_is_saved_without_halves() -> None:
    params = [Parameter(torch.ones(3, dtype=torch.bfloat16)), Parameter(torch.ones(3))]
    opt = Modular(params, Adam(), LR(1e-2), rounding="exact")
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    state = opt.state_dict()["state"]
    assert [Exact.key in state[i] for i in range(2)] == [True, False]
    opt.load_state_dict(saved(opt.state_dict()))
    assert [Exact.key in opt.state[p] for p in params] == [True, False]


WRONG_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing keys: \\['1.bias'\\]": lambda whole: {k: t for k, t in whole.items() if k != "1.bias"},
    "unexpected keys: \\['2.bias'\\]": lambda whole: {**whole, "2.bias": torch.zeros(4)},
    "'1.weight' has shape": lambda whole: {**whole, "1.weight": torch.zeros(4, 4)},
    "'1.bias' must be a tensor, got float": lambda whole: {**whole, "1.bias": 0.0},
    "must be a state dict, got NoneType": lambda whole: None,
}


@pytest.mark.parametrize("words", WRONG_STATES)
def test_a_state_that_does_not_fit_changes_nothing(words: str) -> None:
    net, opt = small("exact")
    trained(net, opt)
    before = {key: t.clone() for key, t in opt.exact_state_dict(net).items()}
    other = {key: t + 1 for key, t in before.items()}
    with pytest.raises((TypeError, ValueError), match=f"load_exact: .*{words}"):
        opt.load_exact(net, WRONG_STATES[words](other))
    assert all([t.equal(before[key]) for key, t in opt.exact_state_dict(net).items()])


def test_a_float32_run_goes_on_behind_bfloat16() -> None:
    """`load_exact` takes any state dict of the model in float32."""
    net, opt = small("nearest", torch.float32)
    trained(net, opt)
    other, later = small("exact")
    later.load_exact(other, net.state_dict())
    assert all([t.equal(net.state_dict()[k]) for k, t in later.exact_state_dict(other).items()])


@pytest.mark.parametrize("last", [ScheduleFree(), WeightEMA(0.9)], ids=["free", "ema"])
def test_averages_begin_at_the_float32_weights_that_were_loaded(last: Any) -> None:
    torch.manual_seed(0)
    low, high = Linear(6, 5).bfloat16(), Linear(6, 5)
    exact = Modular(low.parameters(), Adam(), LR(1e-2), last, rounding="exact")
    whole = Modular(high.parameters(), Adam(), LR(1e-2), last)
    exact.load_exact(low, high.state_dict())
    low.load_state_dict({key: upper(t) for key, t in high.state_dict().items()})
    exact.load_state_dict(saved(exact.state_dict()))  # also before a first step
    for i in range(5):
        for p, q in zip(low.parameters(), high.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
            q.grad = p.grad.float()
        exact.step()
        whole.step()
    theirs = whole.averaged_state_dict(high)
    assert all([t.equal(theirs[key]) for key, t in exact.averaged_state_dict(low).items()])
    exact.train()
    assert all([t.equal(high.state_dict()[k]) for k, t in exact.exact_state_dict(low).items()])


def test_weights_for_evaluation_are_no_upper_halves() -> None:
    net = Linear(6, 5).bfloat16()
    opt = Modular(net.parameters(), Adam(), LR(1e-2), WeightEMA(0.9), rounding="exact")
    trained(net, opt)
    whole = opt.exact_state_dict(net)
    takes: dict[str, Callable[[], Any]] = {
        "exact_state_dict": lambda: opt.exact_state_dict(net),
        "load_exact": lambda: opt.load_exact(net, whole),
    }
    for name, take in takes.items():
        with (
            opt.averaged(),
            pytest.raises(
                RuntimeError, match=rf"{name}\(\) is not allowed in the with block of averaged"
            ),
        ):
            take()
        opt.eval()
        with pytest.raises(
            RuntimeError, match=rf"{name}\(\) is not allowed between eval\(\) and train\(\)"
        ):
            take()
        opt.train()
    assert all([t.equal(whole[key]) for key, t in opt.exact_state_dict(net).items()])


@pytest.mark.parametrize("what", ["exact_state_dict", "load_exact"])
def test_other_roundings_have_no_float32_weights(what: str) -> None:
    net, opt = small("kahan")
    given = [net] if what == "exact_state_dict" else [net, net.state_dict()]
    with pytest.raises(ValueError, match=f"{what}: .*rounding='kahan'"):
        getattr(opt, what)(*given)


def test_a_model_of_somebody_else_is_a_sentence() -> None:
    _, opt = small("exact")
    other = Linear(2, 2)
    with pytest.raises(
        ValueError, match="exact_state_dict: model must be the model that this optimizer"
    ):
        opt.exact_state_dict(other)
    with pytest.raises(
        ValueError, match="load_exact: model must be the model that this optimizer trains"
    ):
        opt.load_exact(other, other.state_dict())


def test_float16_is_a_sentence_that_names_kahan() -> None:
    with pytest.raises(
        ValueError, match="does not support parameters in float16: use rounding='kahan'"
    ):
        Modular([Parameter(torch.ones(2, dtype=torch.float16))], LR(0.1), rounding="exact")


# ---------------------------------------------------------------------- the rest of the library


def test_weights_for_evaluation_are_in_float32() -> None:
    torch.manual_seed(0)
    nets = [Linear(6, 5).bfloat16(), Linear(6, 5)]
    nets[1].load_state_dict(nets[0].state_dict())
    opts = [
        Modular(net.parameters(), Adam(), LR(1e-2), WeightEMA(0.9), rounding=rounding)
        for net, rounding in zip(nets, ("exact", "nearest"), strict=True)
    ]
    for i in range(6):
        pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
        for low, high in pairs:
            low.grad = torch.randn(low.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
            high.grad = low.grad.float()
        for opt in opts:
            opt.step()
    ours, theirs = [o.averaged_state_dict(n) for o, n in zip(opts, nets, strict=True)]
    assert all([ours[key].equal(theirs[key]) for key in theirs])
    before = [weights_of(opts[0], p).clone() for p in nets[0].parameters()]
    with opts[0].averaged():
        for key, value in nets[0].state_dict().items():
            assert value.equal(theirs[key].bfloat16())
    assert all(map(torch.equal, before, [weights_of(opts[0], p) for p in nets[0].parameters()]))
    opts[0].eval()
    opts[0].train()
    assert all(map(torch.equal, before, [weights_of(opts[0], p) for p in nets[0].parameters()]))


def _step(opt: Modular, model: Linear, factor: float = 1.0) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, factor)
    opt.step()


@EVERY_ENGINE
@pytest.mark.parametrize("form", [Exact, Kahan])
def test_steps_in_float32_drop_the_halves(form: Any, engine: str) -> None:
    rounding = {Exact: "exact", Kahan: "kahan"}[form]
    model = Linear(6, 5).bfloat16()
    opt = Modular(model.parameters(), LR(1e-3), rounding=rounding, **ENGINES[engine])
    _step(opt, model)
    assert opt.state[model.weight][form.key].any()
    _step(opt, model.float())
    assert form.key not in opt.state[model.weight]
    _step(opt, model.bfloat16(), factor=0.0)
    assert not opt.state[model.weight][form.key].any()


def test_a_model_that_becomes_float16_is_a_sentence() -> None:
    for make_state in (False, True):
        model = Linear(6, 5).bfloat16()
        opt = Modular(model.parameters(), LR(1e-3), rounding="exact")
        _step(opt, model)
        before = model.half().weight.detach().clone()
        with pytest.raises(ValueError, match="does not support parameters in float16"):
            opt.init_state() if make_state else _step(opt, model)
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize("compiled", [False, True])
def test_released_gradients(compiled: bool) -> None:
    nets = [Sequential(Linear(6, 5), Linear(5, 4)).bfloat16() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    given = [ClipNorm(0.5), Adam(), LR(1e-3)], {"rounding": "exact", "compile": compiled}
    opts = [
        release(nets[0], *given[0], **given[1]),
        Modular(nets[1].parameters(), *given[0], **given[1]),
    ]
    for i in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).bfloat16()
        for net, opt in zip(nets, opts, strict=True):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        ours, theirs = weights_of(opts[0], p), weights_of(opts[1], q)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
