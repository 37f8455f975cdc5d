"""Guards: a step that should not happen leaves no trace but the counters."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers import Named, at_once, close, gradients, parameters, same, set_grads
from tests.table import Case, mechanisms, sampled
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    Guard,
    Identity,
    Masked,
    Modular,
    Momentum,
    RAdam,
    SkipLarge,
    Transform,
    WeightDecay,
    attach,
    to_floats,
)
from torchzero_clip.core.norms import shards
from torchzero_clip.modules.flow import step_guard

inf, nan = math.inf, math.nan
BAD = pytest.mark.parametrize("bad", [nan, inf, -inf])
GUARDS = {
    "Guard": (Guard, nan),
    "SkipLarge": (lambda **kw: SkipLarge(50.0, **kw), 1e6),
}
EVERY_GUARD = pytest.mark.parametrize("kind", GUARDS)


def spoilt(grads: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """The gradients with one bad entry."""
    grads = {n: g.clone() for n, g in grads.items()}
    grads["embed.weight"].view(-1)[1] = value
    return grads


def one(*links: Transform) -> tuple[Parameter, Modular]:
    p = Parameter(torch.zeros(2))
    return p, Modular([("w", p)], *links)


def step(p: Parameter, opt: torch.optim.Optimizer, *values: float) -> list[float]:
    """A step with this gradient; returns the parameter after it."""
    p.grad = torch.tensor(values)
    opt.step()
    out: list[float] = p.tolist()
    return out


# ---------------------------------------------------------------------- a step that never came


def optimizer(params: Named, *links: Transform, way: str = "eager") -> Modular:
    """A chain in one of the ways that it may run."""
    opt = Modular(params.items(), *links, compile=way != "eager")
    if way == "recorded":
        opt.engine = opt.engine.twin()
    return opt


def may_follow(case: Case) -> bool:
    """Whether the rule may stand after a guard."""
    return case.make().place != "first"


@sampled(may_follow, one_in=2)
def test_after_skipped_steps_the_run_is_what_it_would_have_been(case: Case):
    check_skipped_steps(case, "eager")


@pytest.mark.parametrize("way", ["recorded", pytest.param("native", marks=pytest.mark.slow)])
@mechanisms(may_follow)
def test_after_skipped_steps_a_compiled_run_is_what_it_would_have_been(case: Case, way: str):
    check_skipped_steps(case, way)


def check_skipped_steps(case: Case, way: str) -> None:
    """A run with skipped steps, and one without them, leave the same."""
    runs = []
    for with_bad in (True, False):
        params = parameters(case.shapes)
        lr = [] if any("lr" in tfm.live for tfm in case.make().walk()) else [LR(0.01)]
        opt = optimizer(params, Guard(), SkipLarge(50.0), case.make(), *lr, way=way)
        for i, before in enumerate([(nan, 1e6), (1e6,), (nan,), (nan, 1e6)]):
            grads = gradients(case.shapes, i, scale=1 + i / 4)
            for bad in before if with_bad else ():  # the first step included
                seen = spoilt(grads, bad)
                set_grads(params, {name: g.clone() for name, g in seen.items()})
                opt.step()
                same({name: p.grad for name, p in params.items()}, seen)
            set_grads(params, grads)
            opt.step()
        runs.append((params, opt))
    (params, opt), (expected, reference) = runs
    near = {"rtol": 1e-5, "atol": 1e-6} if way == "native" else EXACTLY  # which replays round apart
    close(params, expected, **near)
    for kind in ("Guard", "SkipLarge"):
        assert opt.param_groups[0]["chain"][f"{kind}/skipped"] == 3
    assert_same_state(opt, params, reference, expected, **near)


EXACTLY = {"rtol": 0.0, "atol": 0.0}


def assert_same_state(
    opt: Modular, params: Named, reference: Modular, others: Named, **near: float
) -> None:
    """Check that both keep the same state, bitwise unless it may be `near`.

    The counters of guards may differ. `Watch/step` may differ too, because `Watch` also counts the
    steps that a guard skips.
    """
    pairs = [(opt.state.get(p, {}), reference.state.get(others[n], {})) for n, p in params.items()]
    pairs += [
        (a["chain"], b["chain"])
        for a, b in zip(opt.param_groups, reference.param_groups, strict=True)
    ]
    for ours, theirs in pairs:
        ours, theirs = [
            {
                k: v
                for k, v in held.items()
                if k.partition("/")[0] not in GUARDS and k != "Watch/step"
            }
            for held in (ours, theirs)
        ]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, Tensor):
                close(ours[key], value, **(near or EXACTLY))
            else:
                assert ours[key] == value, key


@BAD
def test_a_skipped_step_changes_no_parameter_and_its_state_is_new(bad):
    p, opt = one(Guard(), Adam(), LR(0.1))
    assert step(p, opt, bad, 1.0) == [0, 0]
    assert not any(value.any() for value in opt.state[p].values())
    assert step(p, opt, 1.0, 1.0) != [0, 0]


def test_one_bad_tensor_skips_the_step_of_all():
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1, dtype=torch.float64))
    opt = Modular([{"params": [p]}, {"params": [q]}], Guard(), LR(0.1))
    p.grad, q.grad = torch.ones(1), torch.full_like(q, nan)
    opt.step()
    assert p.item() == q.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_guarded(dtype):
    p = Parameter(torch.zeros(2, dtype=dtype))
    opt = Modular([p], Guard(), LR(0.1))
    p.grad = torch.tensor([1, inf], dtype=dtype)
    opt.step()
    assert not p.any()
    p.grad = torch.ones_like(p)
    opt.step()
    assert p.all()


def test_the_largest_finite_values_are_no_reason_to_skip():
    p, opt = one(Guard(), LR(1e-38))
    most = torch.finfo(torch.float32).max
    assert step(p, opt, most, -most)[0] == pytest.approx(-3.4, abs=0.1)


# ---------------------------------------------------------------------- zero, raise


def test_zero_replaces_bad_entries_and_keeps_the_others():
    p, opt = one(Guard("zero"), LR(1.0))
    assert step(p, opt, nan, 2.0) == [0, -2]
    assert step(p, opt, -inf, 1.0) == [0, -3]
    assert step(p, opt, 5.0, inf) == [-5, -3]


def test_zero_leaves_the_gradient_itself_as_it_was():
    p, opt = one(Guard("zero"), LR(1.0))
    step(p, opt, nan, 2.0)
    assert p.grad[0].isnan()


def test_zero_keeps_bad_entries_from_the_state_of_later_links():
    p, opt = one(Guard("zero"), Adam(), LR(0.1))
    step(p, opt, nan, 2.0)
    assert opt.state[p]["Adam/exp_avg"].tolist() == pytest.approx([0, 0.2])
    assert opt.state[p]["Adam/step"].item() == 1


@BAD
def test_raise_names_the_parameters(bad):
    params = parameters()
    opt = Modular(params.items(), Guard("raise"), Adam(), LR(0.1))
    grads = spoilt(gradients(), bad)
    grads["head.one"].fill_(bad)
    set_grads(params, grads)
    before = {n: p.detach().clone() for n, p in params.items()}
    with pytest.raises(RuntimeError, match=r"gradients in \['embed.weight', 'head.one'\]$"):
        opt.step()
    same(params, before)
    assert not any(opt.state.values())


def test_raise_counts_parameters_where_there_are_no_names():
    a, b, c = (Parameter(torch.zeros(1)) for _ in range(3))
    opt = Modular([{"params": [a]}, {"params": [b, c]}], Guard("raise"))
    a.grad, c.grad = torch.ones(1), torch.tensor([nan])
    with pytest.raises(RuntimeError, match=r"gradients in \['parameter 1 of group 1'\]$"):
        opt.step()


def test_raise_lets_healthy_steps_happen():
    p, opt = one(Guard("raise"), LR(1.0))
    assert step(p, opt, 1.0, 2.0) == [-1, -2]


# ---------------------------------------------------------------------- SkipLarge


def test_a_step_at_the_limit_happens_and_one_above_it_does_not():
    p, opt = one(SkipLarge(5.0), LR(1.0))
    assert step(p, opt, 3.0, 4.0) == [-3, -4]
    assert step(p, opt, 3.1, 4.0) == [-3, -4]


def test_the_norm_of_all_gradients_counts():
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    opt = Modular([{"params": [p]}, {"params": [q]}], SkipLarge(4.9), LR(1.0))
    p.grad, q.grad = torch.tensor([3.0]), torch.tensor([4.0])
    opt.step()
    assert p.item() == q.item() == 0
    opt.param_groups[0]["max_norm"] = 5.0
    opt.step()
    assert (p.item(), q.item()) == (-3, -4)


@BAD
def test_a_norm_that_is_no_number_is_too_large(bad):
    p, opt = one(SkipLarge(1e30), Adam(), LR(0.1))
    assert step(p, opt, bad, 1.0) == [0, 0]
    assert not any(value.any() for value in opt.state[p].values())


def test_a_limit_of_inf_lets_everything_finite_pass():
    p, opt = one(SkipLarge(inf), LR(1e-30))
    assert step(p, opt, 1e30, 0.0) == pytest.approx([-1, 0])


# ---------------------------------------------------------------------- max_consecutive, counters


@EVERY_GUARD
def test_after_so_many_skipped_steps_in_a_row_it_raises(kind):
    make, bad = GUARDS[kind]
    p, opt = one(make(max_consecutive=3), LR(1.0))
    step(p, opt, bad, 1.0), step(p, opt, bad, 1.0)
    step(p, opt, 1.0, 1.0)  # a good step starts the count anew
    step(p, opt, bad, 1.0), step(p, opt, bad, 1.0)
    with pytest.raises(RuntimeError, match=f"{kind}: skipped 3 steps in a row because"):
        step(p, opt, bad, 1.0)
    assert p.tolist() == [-1, -1]


@EVERY_GUARD
def test_metrics_count_the_skipped_steps(kind):
    make, bad = GUARDS[kind]
    p, opt = one(make(), LR(1.0))
    counts = []
    for value in (1.0, bad, bad, 1.0, bad):
        step(p, opt, value, 1.0)
        counts.append(to_floats(opt.metrics())[f"{kind}/skipped"])
    assert counts == [0, 1, 2, 2, 3]


@EVERY_GUARD
def test_the_counters_are_in_the_checkpoint(kind):
    make, bad = GUARDS[kind]
    p, opt = one(make(max_consecutive=3), LR(1.0))
    step(p, opt, bad, 1.0), step(p, opt, bad, 1.0)
    memory = io.BytesIO()
    torch.save(opt.state_dict(), memory)
    memory.seek(0)
    q, other = one(make(max_consecutive=3), LR(1.0))
    other.load_state_dict(torch.load(memory, weights_only=True))
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        step(q, other, bad, 1.0)
    assert other.param_groups[0]["chain"][f"{kind}/skipped"] == 3


@at_once("fused", [True, False])
@at_once(
    "links", [(RAdam(), Adam()), (Adam(), Momentum(0.9)), (ClipNormByEMA(0.9), RAdam(), Adam())]
)
def test_a_run_whose_first_steps_were_skipped_is_resumed(links, fused):
    """The guard's flag is read somewhere in the chain: of what follows nothing has state then."""
    runs = []
    for resumed in (False, True):
        params = parameters()
        opt = Modular(params.items(), Guard(), *links, LR(0.01), fused=fused)
        for i, bad in enumerate([nan, nan, None, None]):
            grads = gradients(seed=i)
            set_grads(params, grads if bad is None else spoilt(grads, bad))
            opt.step()
            if resumed:
                before, opt = opt, Modular(params.items(), Guard(), *links, LR(0.01), fused=fused)
                opt.load_state_dict(copy.deepcopy(before.state_dict()))
        runs.append((params, opt))
    (params, opt), (expected, reference) = runs
    same(params, expected)
    assert_same_state(opt, params, reference, expected)


def test_a_copy_counts_for_itself():
    p, opt = one(Guard(), LR(1.0))
    step(p, opt, nan, 1.0)
    other = copy.deepcopy(opt)
    step(other.param_groups[0]["params"][0], other, nan, 1.0)
    assert opt.param_groups[0]["chain"]["Guard/skipped"] == 1
    assert other.param_groups[0]["chain"]["Guard/skipped"] == 2


# ---------------------------------------------------------------------- position


@pytest.mark.parametrize("guard", [Guard(), Guard("zero"), Guard("raise"), SkipLarge(1.0)])
@pytest.mark.parametrize(
    "chain",
    [
        lambda guard: [Adam(), guard],
        lambda guard: [Identity(), guard, Adam()],
        lambda guard: [Masked(Chain(guard, Adam()), lambda n, p: True)],
        lambda guard: [Guard(name="first"), Chain(ClipNorm(1.0), name="c"), guard],
    ],
    ids=["last", "second", "inside", "after a chain"],
)
def test_a_guard_elsewhere_is_an_error_that_says_where_it_belongs(guard, chain):
    name = type(guard).__name__
    with pytest.raises(
        ValueError, match=f"{name} must be the first transform, got the transforms in the order"
    ):
        one(*chain(guard))


@pytest.mark.parametrize(
    "links",
    [
        [Guard(), SkipLarge(5.0), Adam()],
        [SkipLarge(5.0), Guard(), Adam()],
        [Chain(Guard(), Chain(SkipLarge(5.0)), Adam())],
    ],
    ids=["two", "two others", "in a chain without a name"],
)
def test_guards_may_stand_next_to_each_other(links):
    p, opt = one(*links, LR(0.1))
    assert step(p, opt, nan, 1.0) == step(p, opt, 6.0, 1.0) == [0, 0]
    assert step(p, opt, 1.0, 1.0) == pytest.approx([-0.1, -0.1])


# ---------------------------------------------------------------------- before another optimizer


@EVERY_GUARD
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_in_front_of_an_attached_optimizer_a_guard_skips_its_whole_step(kind, make):
    guard, bad = GUARDS[kind]
    runs = []
    for with_bad in (True, False):
        p = Parameter(torch.ones(2))
        opt = make([p], lr=0.1, **({"momentum": 0.9} if make is not torch.optim.AdamW else {}))
        handle = attach(opt, guard(), ClipNorm(1.0))
        for i in range(4):
            if with_bad:
                step(p, opt, bad, 1.0)
            step(p, opt, 1.0 + i, 1.0)
        runs.append((p, opt.state[p], handle))
    (p, state, handle), (q, expected, _) = runs
    assert p.equal(q)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key
    assert handle.param_groups[0]["chain"][f"{kind}/skipped"] == 4


def test_momentum_does_not_move_a_parameter_in_a_skipped_step():
    p, opt = one(Guard(), Momentum(0.9), LR(1.0))
    first = step(p, opt, 1.0, 1.0)
    assert step(p, opt, nan, 1.0) == first
    expected: Any = pytest.approx([-2.9, -2.9])
    assert step(p, opt, 1.0, 1.0) == expected


@at_once("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_behind_a_guard_weights_decay_as_without_one(dtype):
    """By a number that a flag decides about, in the precision of the arithmetic."""
    ends = []
    for guards in ((), (Guard(),)):
        p = Parameter(torch.linspace(-1, 1, 100, dtype=dtype))
        opt = Modular([p], *guards, Momentum(0.9), WeightDecay(0.5), LR(0.05))
        for step in range(4):
            p.grad = torch.full_like(p, 1e-3 * step)
            opt.step()
        ends.append(p.detach())
    same(*ends)


@at_once("placements", [(Replicate(), Shard(0)), (Shard(0), Replicate())])
def test_a_nan_in_another_replica_of_sharded_gradients_skips_the_step(placements, monkeypatch):
    """In HSDP, the ranks of this replica do not see the gradients of the others."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    monkeypatch.setattr(step_guard, "gather", lambda x, group: torch.stack([x, x, x * nan, x]))
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        p = Parameter(DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False))
        p.grad = torch.ones_like(p)
        opt = Modular([p], Guard(), LR(1.0))
        opt.step()
        assert p.detach().to_local().eq(1).all()
        assert opt.metrics()["Guard/skipped"] == 1
    finally:
        dist.destroy_process_group()


def test_a_rank_measures_its_own_replica_next_to_tensors_without_replicas(monkeypatch):
    """Otherwise no rank sees a NaN in the second replica, because one collective gathers both."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())

    def only_here(x: Tensor, group: Any) -> Tensor:
        """Return finite statistics for the ranks 0 to 2."""
        finite = torch.zeros_like(x)
        return torch.stack([finite, finite, finite, x])

    monkeypatch.setattr(shards, "gather", only_here)
    monkeypatch.setattr(step_guard, "gather", only_here)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        params = []
        for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate())):
            local = torch.ones(2, 2)
            params.append(Parameter(DTensor.from_local(local, mesh, placements, run_check=False)))
        opt = Modular(params, Guard(), LR(1.0))
        for p in params[1:]:
            for each in params:
                each.grad = torch.ones_like(each)
            p.grad.to_local().fill_(nan)
            opt.step()
        assert opt.metrics()["Guard/skipped"] == 2
    finally:
        dist.destroy_process_group()
