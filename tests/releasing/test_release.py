"""release: the same bits as without, one gradient at a time, and sentences where that cannot be."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

from tests.helpers import Named, close, equal, gradients, network, parameters, same, saved
from tests.modules.rows.row import with_lr
from tests.table import every
from torchzero_clip import (
    AGC,
    LR,
    Accumulate,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    ClipValue,
    Freeze,
    Guard,
    Masked,
    Modular,
    Momentum,
    Normalize,
    Recorder,
    Reset,
    Sign,
    Transform,
    WeightDecay,
    When,
    ZClip,
    release,
)

STEPS = 5
LINKS = (ClipNorm(0.1), Adam(), WeightDecay(0.1), ClipNorm(0.5), LR(0.05))


def far(tfm: Transform) -> bool:
    """Whether something in it looks further than a tensor."""
    return any(isinstance(one, Transform) and one.reach != "tensor" for one in tfm.walk())


def backward(params: Named, grads: dict[str, Tensor | None]) -> None:
    """Gradients that are exactly these, one after another."""
    parts = [(p * grads[name]).sum() for name, p in params.items() if grads[name] is not None]
    torch.autograd.backward(parts)


def train(params: Named, opt: torch.optim.Optimizer, steps: list[Any]) -> Named:
    for grads in steps:
        opt.zero_grad()
        backward(params, grads)
        opt.step()
    return params


def loss_of(model: nn.Module, seed: int = 0, inputs: int = 4) -> Tensor:
    x = torch.randn(16, inputs, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def left(model: nn.Module) -> list[str]:
    """The parameters that have a gradient."""
    return [name for name, p in model.named_parameters() if p.grad is not None]


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    "fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "plain"]
)
@every(lambda case: not far(case.make()))
def test_rules_inside_a_tensor_give_the_same_bits(case, fused):
    steps: list[Any] = [gradients(case.shapes, i, scale=i + 1.0) for i in range(STEPS)]
    steps[3]["conv.weight"] = None  # a parameter that is not used
    found = []
    for make in (Modular, release):
        params = parameters(case.shapes)
        opt = make(list(params.items()), *with_lr(case.make(), 0.1), fused=fused)
        train(params, opt, steps)
        found.append((params, opt.state_dict(), opt.metrics()))
    assert equal(*[{n: p.detach() for n, p in params.items()} for params, _, _ in found])
    assert equal(found[0][1], found[1][1])
    same(found[1][2], found[0][2])


@every(lambda case: far(case.make()) and not isinstance(case.make(), Accumulate))
def test_rules_that_look_further_are_refused_with_the_two_ways_out(case):
    with pytest.raises(
        ValueError, match=r"release: .* combines all parameters of a (layer|group|model)"
    ) as e:
        release(list(parameters(case.shapes).items()), *with_lr(case.make(), 0.1))
    assert "use a transform of single tensors" in str(e.value)
    assert "limit='last step'" in str(e.value)


CHAINS: dict[str, Any] = {
    "clip, Adam": lambda: LINKS,
    "EMA clip": lambda: (ClipNormByEMA(), Momentum(0.9), LR(0.05)),
    "growth": lambda: (ClipNormGrowth(), ZClip(dim=None, warmup_steps=2), Adam(), LR(0.05)),
    "rows": lambda: (AGC(0.01), Adam(amsgrad=True), LR(0.05)),
    "sometimes": lambda: (
        When(lambda step: step % 2 == 0, ClipValue(0.01)),
        Reset(Adam(), 3, 2),
        Masked(When(lambda step: step > 2, WeightDecay(0.1)), lambda name, p: p.dim() > 1),
        LR(0.05),
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "stochastic": {"rounding": "stochastic"},
    "kahan": {"rounding": "kahan"},
}


QUICK = {
    *[(chain, "eager") for chain in CHAINS],
    ("growth", "compiled"),
    ("growth", "kahan"),
    ("clip, Adam", "stochastic"),
    ("sometimes", "stochastic"),
}


@pytest.mark.parametrize(
    ("chain", "way"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(CHAINS, WAYS)
    ],
)
def test_training_and_resuming_give_the_same_bits(chain, way):
    options, links = WAYS[way], CHAINS[chain]()
    if chain == "sometimes" and way != "stochastic":
        options = options | {"fused": False, "compile": False}  # see the test below
    dtype = torch.bfloat16 if "rounding" in options else torch.float32
    made = []
    for make in (Modular, release):
        model = deep(dtype, 3)
        opt = make(model.named_parameters(), *links, **options)
        scheduler = CosineAnnealingLR(opt, 10)
        for i in range(6):
            if make is release and i == 4:  # a new process
                state, weights = saved(opt.state_dict()), saved(model.state_dict())
                model = deep(dtype, 3)
                model.load_state_dict(weights)
                opt, last = release(model, *links, **options), scheduler.state_dict()
                opt.load_state_dict(state)
                scheduler = CosineAnnealingLR(opt, 10)
                scheduler.load_state_dict(last)
            loss_of(model, i, 300).backward()
            assert make is Modular or left(model) == []
            opt.step()
            scheduler.step()
            opt.zero_grad()
        made.append((dict(model.state_dict()), opt.state_dict()))
    assert equal(made[0], made[1])


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_mask_behind_a_link_that_waits_agrees_to_rounding(way):
    """It ends the wait where parameters part, and a single one never parts."""
    found = []
    for make in (Modular, release):
        model = deep()
        opt = make(model.named_parameters(), *CHAINS["sometimes"](), **WAYS[way])
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i, 300).backward()
            opt.step()
        found.append(dict(model.state_dict()))
    close(found[0], found[1], rtol=1e-2, atol=2e-3)  # Adam divides rounding by tiny averages


class Cast(nn.Module):
    """Activations in the dtype of the model."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()


def deep(dtype: torch.dtype = torch.float32, blocks: int = 9) -> nn.Module:
    """Matrices and vectors of many sizes: norms of some are taken in rows, of some together."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wide = [
            nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(blocks)
        ]
        layers = [nn.Linear(300, 64), nn.LayerNorm(64), nn.Linear(64, 16), *wide]
        return Cast(nn.Sequential(*layers).to(dtype), dtype)


# ---------------------------------------------------------------------- one gradient at a time


class Spy(Transform):
    """Counts the gradients that are alive whenever a parameter steps."""

    model: Any
    alive: Any

    reach = "tensor"

    def step(self, buckets: list[Any]) -> list[Any]:
        self.alive.append(len(left(self.model)))
        return buckets


def test_at_most_one_gradient_is_alive_at_any_hook():
    model, alive, before = deep(), [], []
    opt = release(model, Spy(model, alive), *LINKS)
    for p in model.parameters():
        p.register_hook(lambda grad: before.append(len(left(model))))  # as it is computed
    for _ in range(2):
        loss_of(model, inputs=300).backward()
        assert left(model) == []
        opt.step()
    count = len(list(model.parameters()))
    assert alive == [1] * 2 * count
    assert before == [0] * 2 * count


class Tied(nn.Module):
    """One matrix that embeds words and tells them apart, and is used between as well."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
            self.middle = nn.Linear(8, 8)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        words = self.words((x[:, :4] * 3).long().remainder(8))
        return self.head(self.middle(words @ self.words.weight).tanh())


def test_tied_weights_step_once_when_all_uses_are_in():
    found, alive = [], []
    for make in (Modular, release):
        model = Tied()
        spied = (Spy(model, alive),) if make is release else ()
        opt = make(model.named_parameters(), *spied, *LINKS)
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i).backward()
            opt.step()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)
    assert alive == [1] * 3 * 3


class Segments(nn.Module):
    """Blocks whose activations are computed again."""

    def __init__(self, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        self.first, self.reentrant = network(4, 8, 4), reentrant
        self.blocks = nn.ModuleList([network(4, 8, 4) for _ in range(3)])
        if tied:
            self.blocks[2] = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("reentrant", "tied"), [(False, False), (False, True), (True, False)])
def test_activations_that_are_checkpointed_change_nothing(reentrant, tied):
    found = []
    for make in (Modular, release):
        model = Segments(reentrant, tied)
        opt = make(model.named_parameters(), *LINKS)
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i).backward()
            assert make is Modular or left(model) == []
            opt.step()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)


def test_a_weight_that_reentrant_checkpoints_share_is_refused_when_it_comes_again():
    model = Segments(reentrant=True, tied=True)
    opt = release(model, *LINKS)
    with pytest.raises(
        RuntimeError, match=r"\(blocks.0.*received a second gradient.*use_reentrant=False"
    ):
        loss_of(model).backward()
    opt.zero_grad()
    opt.last_backward = False  # the other way out: all step at the end
    loss_of(model).backward()
    opt.step()
    assert left(model) == []


def test_gradients_in_autocast_are_released_too():
    found = []
    for make in (Modular, release):
        model = deep()
        opt = make(model.named_parameters(), *LINKS)
        for i in range(3):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, i, 300)
            loss.backward()
            assert make is Modular or left(model) == []
            opt.step()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)


# ---------------------------------------------------------------------- accumulation


def test_the_gradients_of_several_batches_are_summed_before_the_last():
    found = []
    for make in (Modular, release):
        model = deep()
        opt = make(model.named_parameters(), *LINKS)
        for step in range(2):
            for part in range(3):
                opt.last_backward = part == 2
                (loss_of(model, 3 * step + part, 300) / 3).backward()
                assert bool(left(model)) == (make is Modular or part < 2)
            opt.step()
            opt.zero_grad()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)


def test_a_second_backward_in_a_step_is_an_error_that_names_the_flag():
    model = network()
    opt = release(model, *LINKS)
    loss_of(model).backward()
    with pytest.raises(
        RuntimeError, match=r"received a second gradient .*call opt.step\(\) after each"
    ):
        loss_of(model).backward()
    opt.zero_grad()  # begins anew
    loss_of(model).backward()
    opt.step()


def test_step_takes_a_closure():
    found = []
    for make in (Modular, release):
        model = network()
        opt = make(model.named_parameters(), *LINKS)

        def closure(model: nn.Module = model, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        losses = [opt.step(closure).item() for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
        found.append({name: p.detach() for name, p in model.named_parameters()})
    assert equal(*found)


# ---------------------------------------------------------------------- an optimizer like others


def test_groups_have_their_own_values_and_new_ones_are_released_too():
    found = []
    for make in (Modular, release):
        model = network()
        first, last = model[0], model[2]
        groups = [{"params": list(first.parameters()), "lr": 0.5, "ClipNorm/max_norm": 0.01}]
        opt = make(groups, ClipNorm(1.0), Adam(), ClipNorm(0.2), LR(0.1))
        opt.add_param_group({"params": list(last.parameters()), "lr": 0.2})
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i).backward()
            assert make is Modular or left(model) == []
            opt.step()
            opt.param_groups[1]["lr"] *= 0.5  # values are read when the first gradient comes
        found.append((dict(model.state_dict()), opt.state_dict()))
    assert equal(*found)


def test_frozen_parameters_stay_and_are_released_once_they_thaw():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    opt = release(model, *LINKS)
    loss_of(model).backward()
    opt.step()
    assert model[0].weight.equal(before)
    model[0].requires_grad_(True)
    loss_of(model).backward()
    opt.step()  # takes the step of those that were not released yet
    assert left(model) == []
    assert not model[0].weight.equal(before)
    loss_of(model).backward()
    assert left(model) == []


def test_parameters_that_a_link_drops_lose_their_gradient_as_well():
    model = network()
    opt = release(model, Freeze(lambda name, p: name.startswith("0.")), *LINKS)
    loss_of(model).backward()
    opt.step()
    assert left(model) == []
    assert {p for p, state in opt.state.items() if state} == set(model[2].parameters())


def test_a_recorder_sees_every_unit():
    found = []
    for make in (Modular, release):
        model = network()
        opt = make(model.named_parameters(), ClipNorm(0.1), AGC(0.01), LR(0.1))
        recorder = Recorder(opt)
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i).backward()
            opt.step()
        found.append((recorder.history(), recorder.units("ClipNorm/norm")))
    assert equal(*found)


def test_metrics_of_rules_with_records_of_their_own_are_kept():
    class Mine(Transform):
        reach = "tensor"

        def step(self, buckets: list[Any]) -> list[Any]:
            buckets[0].step.record[buckets[0].bound.path] = {"seen": 1.0}
            return buckets

    model = network()
    opt = release(model, Mine(), *LINKS)
    loss_of(model).backward()
    opt.step()
    assert opt.metrics()["Mine/seen"] == 1.0


def test_once_removed_it_is_an_optimizer_like_others():
    found = []
    for make in (Modular, release):
        model = network()
        opt = make(model.named_parameters(), *LINKS)
        if make is release:
            opt.remove()
        for i in range(3):
            opt.zero_grad()
            loss_of(model, i).backward()
            assert len(left(model)) == 4
            opt.step()
        found.append(dict(model.state_dict()))
    assert equal(*found)


def test_an_optimizer_that_is_gone_lets_gradients_be():
    model = network()
    opt = release(model, *LINKS)
    del opt
    gc.collect()
    loss_of(model).backward()
    assert len(left(model)) == 4
    again = release(model, *LINKS)
    model.zero_grad()
    loss_of(model).backward()
    assert left(model) == []
    assert again.explain().startswith("Each parameter is updated as soon as")


def test_what_is_said_of_it_names_its_options_and_its_plan_is_that_of_its_engine():
    opt = release(network(), *LINKS, compile=True, limit="last step")
    assert ", compile=True, limit='last step')\n" in repr(opt)
    plan = opt.explain()
    assert "one compiled kernel" in plan
    assert "_foreach" not in plan
    assert "replayed, for these reasons:\n- release updates each parameter separately" in plan
    rules = release(network(), Sign(), ClipNorm(1.0), LR(0.1), compile=True)
    assert "in addition to the state: 1 × the size of the largest parameter." in rules.explain()
    eager = release(network(), ClipNorm(1.0), Adam(), LR(0.1)).explain()
    assert "writes new memory" in eager
    assert "a buffer" not in eager
    assert eager.endswith("in addition to the state: none.")


def test_state_can_be_made_before_the_first_step():
    model, other = network(), network()
    opt, early = release(model, *LINKS), release(other, *LINKS)
    early.init_state()
    assert set(early.state) == set(other.parameters())
    for net, one in ((model, opt), (other, early)):
        loss_of(net).backward()
        one.step()
    assert equal(dict(model.state_dict()), dict(other.state_dict()))


# ---------------------------------------------------------------------- the norm of the last step


def by_hand(seeds: list[int], max_norm: float) -> dict[str, Tensor]:
    """Momentum, with the factor of the norm of the step before."""
    model, factor = network(), 1.0
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in seeds:
        opt.zero_grad()
        loss_of(model, seed).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])).item()
        for grad in grads:
            grad.mul_(factor)
        opt.step()
        factor = min(1.0, max_norm / norm)
    return dict(model.state_dict())


def test_the_factor_is_that_of_the_norm_of_the_step_before():
    model = network()
    links = ClipNorm(0.2, dim="global"), Momentum(0.9), LR(0.1)
    opt = release(model, *links, limit="last step")
    for seed in range(5):
        loss_of(model, seed).backward()
        assert left(model) == []
        opt.step()
    torch.testing.assert_close(dict(model.state_dict()), by_hand(list(range(5)), 0.2))
    assert opt.metrics()["ClipNorm/norm"].shape == ()


SUMMED: dict[str, Any] = {
    "global": lambda: (ClipNorm(0.2, dim="global"), Adam(), LR(0.1)),
    "layer": lambda: (Normalize(0.2, dim="layer"), Momentum(0.9), LR(0.1)),
    "group": lambda: (ClipNorm(0.2, dim="group"), Adam(), LR(0.1)),
    "z score": lambda: (ZClip(warmup_steps=2), Adam(), LR(0.1)),
    "growth": lambda: (Adam(), ClipNormGrowth(dim="global"), LR(0.1)),
    "warm-up": lambda: (AdaGC(warmup_steps=3), Adam(), LR(0.1)),
    "masked": lambda: (
        Masked(ClipNorm(0.2, dim="global"), lambda name, p: p.dim() > 1),
        Adam(),
        LR(0.1),
    ),
}


@pytest.mark.parametrize("chain", SUMMED)
def test_rules_of_the_last_step_resume_to_the_bit_and_measure_what_modular_measures(chain):
    whole, halves = network(), network()
    one = release(whole, *SUMMED[chain](), limit="last step")
    two = release(halves, *SUMMED[chain](), limit="last step")
    for seed in range(8):
        if seed == 4:
            state = saved(two.state_dict())
            two.remove()
            two = release(halves, *SUMMED[chain](), limit="last step")
            two.load_state_dict(state)
        for model, opt in ((whole, one), (halves, two)):
            loss_of(model, seed).backward()
            opt.step()
        assert equal(dict(whole.state_dict()), dict(halves.state_dict()))
    assert equal(one.state_dict(), two.state_dict())
    plain = network()
    opt = Modular(plain.named_parameters(), *SUMMED[chain]())
    fresh = network()
    late = release(fresh, *SUMMED[chain](), limit="last step")
    for model, made in ((plain, opt), (fresh, late)):
        loss_of(model).backward()
        made.step()
    for name, value in opt.metrics().items():  # of the first step, whose gradients are the same
        torch.testing.assert_close(late.metrics()[name], value)


def test_groups_of_the_last_step_have_their_own_limits():
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "max_norm": 0.01},
        {"params": list(model[2].parameters())},
    ]
    opt = release(groups, ClipNorm(1e9, dim="global"), LR(0.1), limit="last step")
    loss_of(model).backward()
    opt.step()
    divisors = [opt.state[p]["ClipNorm/divisor"].item() for p in model.parameters()]
    norm = opt.metrics()["ClipNorm/norm"].item()
    assert divisors[:2] == pytest.approx([norm / 0.01] * 2)
    assert divisors[2:] == [1.0, 1.0]


def test_a_norm_that_is_no_number_sets_no_factor():
    model = network()
    opt = release(model, ClipNorm(0.1, dim="global"), LR(0.1), limit="last step")
    loss_of(model).backward()
    opt.step()
    before = [opt.state[p]["ClipNorm/divisor"].clone() for p in model.parameters()]
    loss_of(model).mul(float("inf")).backward()
    opt.step()
    assert equal(before, [opt.state[p]["ClipNorm/divisor"] for p in model.parameters()])


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("links", "sentence"),
    [
        ((Guard(), LR(0.1)), "release: Guard combines all parameters of a model"),
        (
            (ClipPercentile(90, dim="global"), LR(0.1)),
            "ClipPercentile combines all parameters of a model",
        ),
        ((Accumulate(2), LR(0.1)), "release: Accumulate is not supported, .*last_backward"),
        ((ClipNormByEMA(dim="layer"), LR(0.1)), "ClipNormByEMA combines all parameters of a layer"),
    ],
)
def test_what_does_more_than_scale_is_refused_with_the_last_step_as_well(links, sentence):
    with pytest.raises(ValueError, match=sentence):
        release(network(), *links, limit="last step")


def test_a_class_that_writes_step_says_how_far_it_looks():
    class Sum(Transform):
        def step(self, buckets: list[Any]) -> list[Any]:
            return buckets

    with pytest.raises(ValueError, match=r'processes each tensor separately, set reach = "tensor"'):
        release(network(), Sum(), LR(0.1))


def test_mistakes_are_sentences():
    model = network()
    with pytest.raises(ValueError, match=r"limit= must be one of \['this step', 'last step'\]"):
        release(model, LR(0.1), limit="yesterday")
    with pytest.raises(TypeError, match="momentum"):
        release(model, LR(0.1), momentum=0.9)
    opt = release(model, LR(0.1))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 \(0.weight\) already belongs to"):
        release(model, LR(0.1))
    opt.remove()
    release(model, LR(0.1))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(opt)
    with pytest.raises(TypeError, match="release does not support GradScaler"):
        _ = opt._step_supports_amp_scaling


def test_a_model_that_averages_gradients_in_buckets_is_refused():
    ddp = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(TypeError, match=r"fully_shard"):
        release(ddp, LR(0.1))


def test_a_sparse_gradient_is_named():
    model = nn.Embedding(4, 3, sparse=True)
    opt = release(model, LR(0.1))
    loss = model(torch.tensor([1])).sum()
    with pytest.raises(TypeError, match=re.escape("parameter 0 of group 0 (weight)")):
        loss.backward()
    opt.zero_grad()
