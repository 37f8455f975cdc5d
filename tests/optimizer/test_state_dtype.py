"""`state_dtype=`: state in half the memory, rounded up or down at random, and never stuck."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import saved, since_2_12
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    Guard,
    Lion,
    Masked,
    Modular,
    Momentum,
    Sign,
    Transform,
    Warmup,
    ZClip,
    optimizer_class,
    release,
)
from torchzero_clip.core.formats.stochastic import (
    DRAWS,
    Elements,
    Stochastic,
    halves_,
    mix_,
    rounded,
)

BF16 = torch.bfloat16
ENGINES: dict[str, dict[str, Any]] = {
    "fused": {},
    "plain": {"fused": False},
    "native": {"compile": True},
}
SHAPES = ((5, 7), (3,), (), (2, 3, 4, 4), (0, 3))


def params(seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def optimizer(*chain: Transform, engine: str = "plain", **options: Any) -> Modular:
    options = {"state_dtype": "bfloat16", **ENGINES[engine], **options}
    return Modular(options.pop("params", None) or params(), *chain, **options)


def train(opt: Modular, steps: range) -> Modular:
    for i in steps:
        generator = torch.Generator().manual_seed(i)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    return opt


def states(opt: Modular, name: str) -> list[Tensor]:
    return [opt.state[p][name] for p in opt.param_groups[0]["params"]]


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize("engine", ["fused", "plain", "native"])
def test_adam_has_four_bytes_of_state_a_parameter(engine):
    p = Parameter(torch.randn(1000, 100))
    opt = optimizer(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3), params=[p], engine=engine)
    train(opt, range(2))
    held = sum(x.nbytes for x in opt.state[p].values())
    assert held == 4 * p.numel() + 4  # and the count of steps


def test_numbers_stay_in_float32():
    opt = train(optimizer(ZClip(), ClipNorm(1.0), Adam(), LR(1e-3)), range(3))
    assert {x.dtype for x in states(opt, "Adam/step")} == {torch.float32}
    assert all(x.dtype == BF16 for x in states(opt, "Adam/exp_avg"))
    assert opt.param_groups[0]["chain"]["ZClip/mean"].dtype == torch.float32


def test_double_and_complex_parameters_keep_their_state():
    wide = [Parameter(torch.randn(3, dtype=t)) for t in (torch.float64, torch.complex64, BF16)]
    opt = Modular(wide, Momentum(), LR(0.1), state_dtype="bfloat16")
    for p in wide:
        p.grad = torch.ones_like(p)
    opt.step()
    kinds = [opt.state[p]["Momentum/momentum_buffer"].dtype for p in wide]
    assert kinds == [torch.float64, torch.complex64, BF16]


def test_a_link_may_say_otherwise_and_so_may_those_inside():
    inner = Chain(EMA(0.5), Momentum(state_dtype="float32"))
    masked = Masked(inner, lambda name, p: True, state_dtype="bfloat16")
    opt = train(optimizer(masked, Adam(), LR(1e-3), state_dtype="float32"), range(1))
    wanted = {"Masked/EMA/ema": BF16, "Masked/Momentum/momentum_buffer": torch.float32}
    for name, dtype in {**wanted, "Adam/exp_avg": torch.float32}.items():
        assert {x.dtype for x in states(opt, name)} == {dtype}


# ---------------------------------------------------------------------- the bits


def kept(*tensors: Tensor) -> Elements:
    return Elements(tensors, [None] * len(tensors))


def test_bits_are_uniform_and_differ_by_key_element_and_half():
    n = 2**16
    keys, places = torch.tensor([[1], [2]], dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    halves = torch.stack(halves_(keys ^ places)).view(4, n).double() / n
    assert (halves.mean(1) - 0.5).abs().max() < 4.5 * (1 / 12 / n) ** 0.5
    assert (halves.var(1) - 1 / 12).abs().max() < 4.5 * (1 / 180 / n) ** 0.5
    counts = torch.stack([torch.histc(row, 64, 0, 1) for row in halves])
    assert (((counts - n / 64) ** 2).sum(1) / (n / 64) < 63 + 4.5 * 126**0.5).all()
    assert (torch.corrcoef(halves) - torch.eye(4)).abs().max() < 4.5 / n**0.5
    for lag in (1, 2, 16, 256):
        pairs = [torch.corrcoef(torch.stack([row[lag:], row[:-lag]]))[0, 1] for row in halves]
        assert torch.stack(pairs).abs().max() < 4.5 / n**0.5


def test_rounding_is_unbiased_over_steps():
    x = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 10 - 5
    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)
    gap = 2.0 ** (torch.frexp(low)[1] - 8) * x.sign()
    start, draws = torch.zeros((), dtype=torch.int32), 3000
    ups = torch.zeros(500)
    for i in range(draws):
        made = rounded(x, mix_(torch.tensor(i, dtype=torch.int32)), start, i % 2).float()
        assert ((made == low) | (made == low + gap)).all()
        ups += made != low
    share = ((x - low) / gap).double()
    z = (ups / draws - share) / (share * (1 - share) / draws).sqrt().clamp(min=1e-3)
    assert z.abs().max() < 4.5


def test_what_bfloat16_holds_and_what_is_no_number_stay():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    start = torch.zeros((), dtype=torch.int32)
    out = rounded(every.float(), torch.tensor(7, dtype=torch.int32), start, 0)
    assert out[~every.isnan()].equal(every[~every.isnan()])
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32)
    assert rounded(payloads.view(torch.float32), start, start, 1).isnan().all()


@pytest.mark.parametrize("form", ["contiguous", "channels last", "transposed", "part"])
def test_a_part_is_rounded_as_in_the_whole(form):
    """Elements go through the memory of the whole, whichever part of it is asked for."""
    x = torch.randn(4, 3, 5, 6)
    if form == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if form == "transposed":
        x = x.transpose(0, 3)
    rounding = Stochastic(torch.tensor([9], dtype=torch.int32), kept(x), 1)
    whole, flat = torch.empty_like(x, dtype=BF16), torch.empty(360, dtype=BF16)
    rounding.store(0, whole, None, x)
    memory = x.as_strided((360,), (1,))
    for begin in range(0, 360, 100):
        some = slice(begin, begin + 100)
        rounding.store(0, flat[some], begin, memory[some])
    assert flat.as_strided(x.shape, x.stride()).equal(whole)


CHAINS = {
    "adam": lambda: [Adam(), LR(1e-2)],
    "lion": lambda: [Lion(), LR(1e-2)],
    "average": lambda: [EMA(0.9), LR(1e-2)],
}


@pytest.mark.parametrize("memory", ["contiguous", "channels last"])
@pytest.mark.parametrize("chain", ["adam", pytest.param("lion", marks=pytest.mark.slow), "average"])
def test_every_engine_has_the_same_bits(chain, memory):
    ends = {}
    for engine in ("plain", "fused", "native"):
        ps = params()
        if memory == "channels last":
            ps[3].data = ps[3].data.contiguous(memory_format=torch.channels_last)
        opt = train(optimizer(*CHAINS[chain](), engine=engine, params=ps), range(4))
        ends[engine] = [x for p in ps for x in opt.state[p].values()]
    for engine in ("fused", "native"):
        pairs = zip(ends["plain"], ends[engine], strict=True)
        assert sum([int((a != b).sum()) for a, b in pairs]) <= 1  # of 274, by float32's rounding


# ---------------------------------------------------------------------- what it is for


@pytest.mark.parametrize("engine", ["fused", "plain", "native"])
def test_a_slow_average_arrives(engine):
    """Rounded to the nearest it would stay where (1 - β) of what is left is half a unit."""
    p = Parameter(torch.zeros(2000))
    opt = optimizer(EMA(0.995), LR(0.0), engine=engine, params=[p])
    for _ in range(600):
        p.grad = torch.ones_like(p)
        opt.step()
    average = opt.state[p]["EMA/ema"].float()
    assert average.mean().item() == pytest.approx(1 - 0.995**600, abs=2e-3)
    nearest = torch.zeros((), dtype=BF16)
    for _ in range(600):
        nearest = nearest.float().lerp(torch.ones(()), 0.005).to(BF16)
    assert nearest < 0.8


# ---------------------------------------------------------------------- saving and copies


@pytest.mark.parametrize("engine", ["fused", "native"])
def test_a_resumed_run_has_the_bits_that_it_would_have_had(engine):
    chain = ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)
    opt = train(optimizer(*chain, engine=engine), range(3))
    later = [Parameter(p.detach().clone()) for p in opt.param_groups[0]["params"]]
    resumed = optimizer(*chain, engine=engine, params=later)
    resumed.load_state_dict(saved(opt.state_dict()))
    assert {*DRAWS} <= resumed.param_groups[0]["chain"].keys()
    for one in (opt, resumed):
        train(one, range(3, 6))
    for name in ("Adam/exp_avg", "Adam/exp_avg_sq"):
        for a, b in zip(states(opt, name), states(resumed, name), strict=True):
            assert a.equal(b)


def test_another_seed_draws_other_bits_and_comes_from_the_checkpoint():
    ends = []
    for seed in (0, 1):
        opt = optimizer(EMA(0.9), LR(0.0))
        opt.init_state()
        given = saved(opt.state_dict())
        for group in given["param_groups"]:
            group["chain"]["state/seed"] = seed
        opt.load_state_dict(given)
        ends.append(states(train(opt, range(2)), "EMA/ema")[0])
    assert not ends[0].equal(ends[1])


def test_float32_optimizers_keep_no_seed():
    opt = train(optimizer(Adam(), LR(1e-3)), range(2))
    plain = optimizer(Adam(), LR(1e-3), state_dtype="float32")
    plain.load_state_dict(saved(opt.state_dict()))
    assert not {*DRAWS} & plain.param_groups[0]["chain"].keys()
    back = optimizer(Adam(), LR(1e-3))
    back.load_state_dict(saved(plain.state_dict()))
    for a, b in zip(states(opt, "Adam/exp_avg"), states(back, "Adam/exp_avg"), strict=True):
        assert a.equal(b)
    train(back, range(2, 4))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chain", [(Adam(), LR(1e-3)), (Momentum(0.9), LR(1e-3))])
def test_a_run_resumes_from_float32_state(engine, chain):
    wide = train(optimizer(*chain, engine=engine, state_dtype="float32"), range(2))
    narrow = optimizer(*chain, engine=engine)
    narrow.load_state_dict(saved(wide.state_dict()))
    train(narrow, range(2, 4))
    assert narrow.param_groups[0]["chain"]["state/step"] == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_continues_with_an_added_group_that_has_no_gradients(engine):
    opt = train(optimizer(Adam(), LR(1e-3), engine=engine), range(2))
    opt.add_param_group({"params": [Parameter(torch.ones(3))]})
    train(opt, range(2, 3))
    assert opt.param_groups[0]["chain"]["state/step"] == 3


@pytest.mark.parametrize("make", [Modular, release])
def test_a_chain_that_keeps_nothing_in_bfloat16_keeps_no_seed(make):
    chains = [Sign(), LR(0.1)], [Warmup(3), LR(0.1)], [ClipNormGrowth(), LR(0.1)]
    for chain in chains:
        opt = make(params(), *chain, state_dtype="bfloat16")
        train(opt, range(2))
        opt.init_state()
        assert not opt.param_groups[0]["chain"].keys() & {*DRAWS}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_go_on_alike(copied):
    opt = train(optimizer(Adam(), LR(1e-3)), range(3))
    other = copied(opt)
    assert other.state_dtype == "bfloat16"
    assert "state_dtype='bfloat16'" in repr(other)
    for one in (opt, other):
        train(one, range(3, 6))
    for a, b in zip(states(opt, "Adam/exp_avg"), states(other, "Adam/exp_avg"), strict=True):
        assert a.equal(b)


def test_a_model_whose_gradients_are_released_has_the_same_bits():
    ends = []
    for make in (release, lambda model, *chain, **kw: Modular(model.parameters(), *chain, **kw)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
        opt = make(model, Adam(), LR(1e-2), state_dtype="bfloat16")
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        ends.append([x for p in model.parameters() for x in opt.state[p].values()])
        assert opt.param_groups[0]["chain"]["state/step"] == 3
    assert all([a.equal(b) for a, b in zip(*ends, strict=True)])


def test_a_compiled_step_that_is_repeated_draws_anew():
    runs = [train(optimizer(*CHAINS["adam"](), engine=e), range(12)) for e in ("plain", "native")]
    for name in ("Adam/exp_avg", "Adam/exp_avg_sq"):
        pairs = zip(*[states(opt, name) for opt in runs], strict=True)
        assert sum([int((a != b).sum()) for a, b in pairs]) <= 4  # by float32's rounding
    assert runs[1].param_groups[0]["chain"]["state/step"] == 12


@pytest.mark.parametrize("engine", ["fused", "plain", "native"])
def test_a_skipped_step_leaves_no_trace(engine):
    ends = []
    for spoil in (True, False):
        opt = optimizer(Guard(), Adam(), LR(1e-3), engine=engine)
        for i in range(4):
            if spoil and i in (0, 2):
                for p in opt.param_groups[0]["params"]:
                    p.grad = torch.full_like(p, torch.nan)
                opt.step()
            train(opt, range(i, i + 1))
        ends.append(states(opt, "Adam/exp_avg") + states(opt, "Adam/exp_avg_sq"))
    assert all([a.equal(b) for a, b in zip(*ends, strict=True)])


# ---------------------------------------------------------------------- arguments and words


@pytest.mark.parametrize("value", ["half", torch.bfloat16, 16, True])
def test_another_dtype_is_a_sentence(value):
    with pytest.raises(ValueError, match=r"Modular: state_dtype must be one of .*'bfloat16'"):
        Modular(params(), LR(1e-3), state_dtype=value)
    with pytest.raises(ValueError, match=r"Adam: state_dtype must be one of .*'bfloat16'"):
        Adam(state_dtype=value)


@pytest.mark.filterwarnings("error:state in bfloat16:UserWarning")
def test_without_a_compiled_step_a_sentence_says_that_it_is_slow():
    for narrow in ({}, {"fused": False}):
        with pytest.warns(
            UserWarning, match=r"state in bfloat16 \(Adam\) .*: pass compile=True"
        ) as found:
            optimizer(ClipNorm(1.0), Adam(), LR(1e-3), engine="plain", **narrow)
        assert len(found) == 1
    with pytest.warns(UserWarning, match=r"state in bfloat16 \(Momentum\)"):
        optimizer(Momentum(state_dtype="bfloat16"), Adam(), LR(1e-3), state_dtype="float32")
    double = [Parameter(torch.zeros(2, dtype=torch.float64))]
    optimizer(Adam(), LR(1e-3), params=double)
    optimizer(Sign(), LR(1e-3))
    optimizer(Adam(), LR(1e-3), engine="native")


def test_a_class_of_optimizers_takes_it():
    make = optimizer_class(Adam(), LR(1e-3), state_dtype="bfloat16")
    assert make(params()).state_dtype == "bfloat16"
    assert make(params(), state_dtype="float32").state_dtype == "float32"


def test_explain_counts_the_bytes_of_state():
    """A gradient twice, the weight and two states read, all but the gradient written."""
    opt = optimizer(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3), engine="native")
    total = next(line for line in opt.explain().splitlines() if line.startswith("total"))
    assert total.split()[1:] == ["16", "8"]


@pytest.mark.slow
@since_2_12
def test_the_step_is_one_graph():
    """And one more where torch has seen its groups change, as with state in float32."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    opts = [optimizer(Adam(), LR(torch.tensor(1e-3)), params=params()[1:3]) for _ in range(2)]
    for opt in opts:
        train(opt, range(1))
    step = torch.compile(opts[0].step, fullgraph=True, backend=counter)
    for i in range(4):
        for opt in opts:
            for p in opt.param_groups[0]["params"]:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        step()
        opts[1].step()
    for a, b in zip(*[states(opt, "Adam/exp_avg") for opt in opts], strict=True):
        assert a.equal(b)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
