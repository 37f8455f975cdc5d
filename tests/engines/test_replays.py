"""Replayed steps are bitwise identical to the same steps without replay."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import at_once, equal
from tests.modules.rows.row import with_lr
from tests.table import Case, sampled
from torchzero_clip import (
    LR,
    Accumulate,
    AdaGC,
    Adam,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Group,
    Guard,
    Lambda,
    Live,
    Masked,
    Modular,
    Momentum,
    Noise,
    NormRule,
    Reset,
    Sign,
    SkipSpike,
    State,
    TensorList,
    Transform,
    UnitState,
    WeightDecay,
    When,
    ZClip,
)
from torchzero_clip.core import Bucket, bind, count_step
from torchzero_clip.core import Chain as Links
from torchzero_clip.core.torch_private import FakeTensorMode
from torchzero_clip.engines.compiled import compiled
from torchzero_clip.engines.compiled.replay.conditions import impure
from torchzero_clip.engines.compiled.replay.replays import Replays
from torchzero_clip.engines.compiled.replay.step_recorder import (
    Refused,
    StepRecorder,
    _quicker,
)

SHAPES = [(5, 4), (4,), (), (3, 4), (0,), (1,)]
Chain = Sequence[Transform]
Change = Callable[[Modular], Any]


def headline() -> Chain:
    return ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(1e-2)


def model(
    chain: Chain,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    split: int = 2,
    names: Sequence[str] = (),
    **options: Any,
) -> Modular:
    """Return an optimizer whose first group has so many parameters, and whose second group has the
    others. Programs run node by node."""
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    names = names or [f"layer{i // 2}.{i}" for i in range(len(params))]
    named = list(zip(names, params, strict=True))
    groups = [{"params": named[:split]}, {"params": named[split:]}]
    opt = Modular([g for g in groups if g["params"]], *chain, compile=True, **options)
    opt.engine = opt.engine.twin()
    return opt


def replays(opt: Modular) -> Replays:
    """Return the `Replays` of an optimizer."""
    engine: Any = opt.engine
    if engine.replays is None:
        engine.replays = Replays(opt.links)
    found: Replays = engine.replays
    return found


def never_replayed(opt: Modular) -> Modular:
    """Have an optimizer run every step without replay; return it."""
    replays(opt)._required = 10**9
    # state_dict() calls forget, after which steps could be recorded
    opt.engine.forget = lambda why: None  # type: ignore[method-assign]
    return opt


def params_of(opt: Modular) -> list[Parameter]:
    return [p for group in opt.param_groups for p in group["params"]]


def give(opt: Modular, seed: int, scale: float = 1.0) -> None:
    """Give every parameter a new gradient in new memory."""
    generator = torch.Generator().manual_seed(seed)
    for p in params_of(opt):
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype)


def holds(opt: Modular) -> list[Any]:
    """Return everything that a step may have changed."""
    rows = [[p, p.grad, opt.state.get(p)] for p in params_of(opt)]
    return [rows, [group["chain"] for group in opt.param_groups], opt.metrics()]


class Twins:
    """The same optimizer twice: one replays steps, the other runs every step without replay."""

    def __init__(self, chain: Callable[[], Chain], **options: Any) -> None:
        self.both = [model(chain(), **options) for _ in range(2)]
        self.fast, self.slow = self.both
        never_replayed(self.slow)
        self.count = 0

    @property
    def replays(self) -> int:
        return replays(self.fast).count

    def step(self, change: Change | None = None, scale: float = 1.0) -> bool:
        """Run a step of both optimizers, which must agree; return whether it was replayed."""
        before = self.replays
        for opt in self.both:
            give(opt, self.count, scale)
            if change is not None:
                change(opt)
            opt.step()
        self.count += 1
        assert equal(holds(self.fast), holds(self.slow))
        return self.replays == before + 1

    def warm(self, steps: int = 3) -> Twins:
        """Run steps, the last of which must be replayed."""
        assert [self.step() for _ in range(steps)][-1]
        return self

    def recovers(self, change: Change | None = None, within: int = 6) -> bool:
        """Return whether one of so many steps, each with this change, is replayed; stop there."""
        return any(self.step(change) for _ in range(within))


CHAINS: dict[str, Callable[[], Chain]] = {
    "headline": headline,
    "memory": lambda: [ZClip(warmup_steps=2), Adam(amsgrad=True), LR(1e-2)],
    "memory of tensors": lambda: [AdaGC(warmup_steps=1), Momentum(0.9, nesterov=True), LR(1e-2)],
    "gradients": lambda: [ClipNorm(0.5, target="grad"), ClipValue(0.1, target="grad"), LR(1e-2)],
    "two norms": lambda: [ClipNorm(1.0), Adam(), ClipNorm(0.1, dim="global"), LR(1e-2)],
    "other orders": lambda: [ClipNorm(1.0, ord=3), Adam(), ClipNorm(0.1, ord="std"), LR(1e-2)],
    "layers": lambda: [ClipNorm(0.3, dim="layer"), LR(1e-2)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_replayed_steps_are_bitwise_identical_whatever_the_gradients_are(name: str) -> None:
    twins = Twins(CHAINS[name])
    scales = [1.0, 1.0, 1.0, 1e-3, 100.0, 0.0, 1e32, 1e-30, float("nan"), float("inf"), 1.0]
    done = [twins.step(scale=scale) for scale in scales]
    assert done == [False, False] + [True] * (len(scales) - 2)


def other(value: float | None) -> float | None:
    """Return another value for a hyperparameter, which is accepted if this one is."""
    if value is None:
        return None
    return (1.01 if 1 <= value < 50 else 0.95) * value


@pytest.mark.parametrize("name", ["headline", "memory", "memory of tensors"])
def test_replays_round_low_precision_state_like_steps_without_replay(name: str) -> None:
    twins = Twins(CHAINS[name], state_dtype="bfloat16")
    scales = [1.0, 1.0, 1.0, 1e-3, 100.0, 0.0, 1e32, float("nan"), 1.0]
    done = [twins.step(scale=scale) for scale in scales]
    assert done == [False, False] + [True] * (len(scales) - 2)
    draws = [opt.param_groups[0]["chain"]["state/step"].item() for opt in twins.both]
    assert draws == [len(scales)] * 2


@sampled(lambda case: not impure(bind(Links(case.make()))))
def test_replays_of_every_pure_rule_are_bitwise_identical(case: Case) -> None:
    """Every class that declares `pure = True` is pure."""
    names, shapes = [*case.shapes], [*case.shapes.values()]
    one_group = {"shapes": shapes, "names": names, "split": len(shapes)}  # half the time of two
    twins = Twins(lambda: with_lr(case.make(), 0.1), **one_group)
    free = list(twins.fast.keys.defaults)
    large = 1e4 if case.nonfinite in ("raises", "stops") else float("inf")
    for scale in [1.0, 2.0, 0.5, 1e-4, 50.0, 0.0, large, 1.0]:  # replayed from the third on

        def change(opt: Modular) -> None:
            group = opt.param_groups[0]
            for key in free:
                value = group[key]
                if isinstance(value, tuple):
                    group[key] = tuple(map(other, value))
                elif type(value) is float:
                    group[key] = other(value)

        twins.step(change, scale)


@pytest.mark.parametrize("backend", ["plain", "native"])
def test_a_step_that_resets_state_alone_runs_without_replay(backend: str) -> None:
    """Replays advance the count of `Reset`, and the warmup after a reset differs in each step."""
    twins = Twins(lambda: [Reset(Adam(), 9, 4, keep=("step",)), LR(1e-2)])
    for opt in twins.both:
        opt.engine.backend = backend  # type: ignore[attr-defined]
    done = [twins.step() for _ in range(30)]
    assert [i for i, replayed in enumerate(done, 1) if not replayed] == [1, 2, 9, 18, 27]
    assert twins.fast.param_groups[0]["chain"]["Reset/step"] == 30
    for opt in twins.both:
        opt.param_groups[0]["chain"]["Reset/step"] = 7  # as loading a checkpoint does
    assert [twins.step() for _ in range(3)] == [True, False, True]


def test_a_step_that_resets_state_is_not_recorded_but_a_later_one_is() -> None:
    """Also if a reset removes state, as `Reset` without keep= removes Adam's step count."""
    twins = Twins(lambda: [Reset(Adam(), 3, 2), LR(1e-2)])
    done = [twins.step() for _ in range(12)]
    assert not any(done[2::3])
    assert sum(done) >= 3


def test_a_lasting_change_of_an_answer_about_a_count_leads_to_another_recording() -> None:
    class Switches(Transform):
        """u from the fifth step on, 2 u before."""

        pure = True

        def step(self, buckets: list[Bucket]) -> list[Bucket]:
            late = buckets[0].step.notes.ask(lambda t: t > 4, count_step(buckets, asks=True))
            for bucket in buckets:
                bucket.u = bucket.u.mul(1.0 if late else 2.0)
            return buckets

        def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
            count_step(buckets, by=0)
            return buckets

    twins = Twins(lambda: [Switches(), LR(1e-2)])
    done = [twins.step() for _ in range(12)]
    assert done[2:4] == [True, True]
    assert not any(done[4:6])
    assert all(done[8:])


DTYPES = [
    ("headline", torch.float64),
    ("headline", torch.bfloat16),
    ("memory", torch.float16),
    ("gradients", torch.bfloat16),
]
"""Chains and dtypes of quick tests."""


def test_steps_with_compiled_programs_are_replayed() -> None:
    twins = Twins(headline)
    for opt in twins.both:
        opt.engine.backend = "native"  # type: ignore[attr-defined]
    assert [twins.step(scale=scale) for scale in (1.0, 1.0, 1e-3, 100.0, 1e32)][2:] == [True] * 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=() if case in DTYPES else pytest.mark.slow
        )
        for case in itertools.product(
            ["headline", "memory", "gradients"], [torch.float64, torch.bfloat16, torch.float16]
        )
    ],
)
def test_steps_in_every_dtype_are_replayed(name: str, dtype: torch.dtype) -> None:
    twins = Twins(CHAINS[name])
    for opt in twins.both:
        for p in params_of(opt):
            p.data = p.data.to(dtype)
    assert twins.recovers()


def test_steps_with_a_scheduler_are_replayed() -> None:
    twins = Twins(headline)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in twins.both]
    done = []
    for _ in range(8):
        done.append(twins.step())
        for scheduler in schedulers:
            scheduler.step()
    assert done == [False] * 2 + [True] * 6


def test_steps_with_other_betas_and_weight_decay_are_replayed() -> None:
    twins = Twins(headline).warm()

    def other(decay: float) -> Change:
        live = {"betas": (0.5, 0.25), "weight_decay": decay, "eps": 1e-3}
        return lambda opt: opt.param_groups[1].update(live)

    assert twins.step(other(0.2))
    assert twins.step(other(0.0))


def test_steps_with_another_loss_are_replayed() -> None:
    """Steps are similar if their losses are all numbers, or all tensors of one dtype."""
    twins = Twins(lambda: [SkipSpike(window=8, least=2), *headline()])
    for of in (float, torch.tensor, lambda loss: torch.tensor(loss, dtype=torch.float64)):
        for i in range(8):
            loss = of(1.0 + 0.1 * (i % 3) + 100 * (i == 6))
            replayed = twins.step(lambda opt, loss=loss: opt.report(loss=loss))
        assert replayed
        assert twins.fast.metrics()["SkipSpike/skipped"]
    assert not twins.step()


def test_steps_with_another_max_norm_are_replayed() -> None:
    twins = Twins(headline).warm()

    def at(limit: float) -> Change:
        return lambda opt: [group.update(max_norm=limit) for group in opt.param_groups]

    assert all([twins.step(at(0.25 * (i + 1))) for i in range(8)])


def frozen(opt: Modular) -> None:
    params_of(opt)[1].grad = None


def swapped(opt: Modular) -> None:
    group = opt.param_groups[1]
    new = Parameter(group["params"][0].detach() + 1)
    new.grad = torch.ones_like(new)
    group["params"][0] = new


def moved(opt: Modular) -> None:
    p = params_of(opt)[0]
    p.data = p.data.clone()


def strided(opt: Modular) -> None:
    p = params_of(opt)[0]
    p.data = p.data.t().contiguous().t()


def resized(opt: Modular) -> None:
    p = params_of(opt)[0]
    opt.state.pop(p)
    p.data, p.grad = torch.ones(7, 2), torch.ones(7, 2)


def emptied(opt: Modular) -> None:
    opt.state.clear()


def without_state(opt: Modular) -> None:
    del opt.state[params_of(opt)[3]]


def other_state(opt: Modular) -> None:
    state = opt.state[params_of(opt)[0]]
    state["Adam/exp_avg"] = torch.full_like(state["Adam/exp_avg"], 0.5)


def other_step(opt: Modular) -> None:
    for p in params_of(opt)[:2]:
        opt.state[p]["Adam/step"] = torch.tensor(100.0)


def moved_state(opt: Modular) -> None:
    average = opt.state[params_of(opt)[0]]["Adam/exp_avg"]
    average.data = torch.full_like(average, 0.5)


def loaded(opt: Modular) -> None:
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        state["Adam/exp_avg"].mul_(2)
    opt.load_state_dict(saved)


def lr_as_tensor(opt: Modular) -> None:
    for group in opt.param_groups:
        group["lr"] = torch.tensor(0.5)


def lr_as_int(opt: Modular) -> None:
    opt.param_groups[0]["lr"] = 1


def another_group(opt: Modular) -> None:
    new = Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    opt.add_param_group({"params": [("new.0", new)]})


def shared_gradients(opt: Modular) -> None:
    p, q = params_of(opt)[1], params_of(opt)[0]
    assert q.grad is not None
    p.grad = q.grad[0]


def gaps(opt: Modular) -> None:
    p = params_of(opt)[0]
    p.grad = torch.arange(40.0).view(5, 8)[:, ::2]


def no_gradients(opt: Modular) -> None:
    opt.zero_grad()


CHANGES: list[Change] = [
    frozen,
    swapped,
    moved,
    strided,
    resized,
    emptied,
    without_state,
    other_state,
    other_step,
    moved_state,
    loaded,
    lr_as_int,
    another_group,
    shared_gradients,
    no_gradients,
]
RARE = [moved, other_step, moved_state]
"""Changes that slow tests and the random events of test_replay_events.py have."""
OFTEN = [change for change in CHANGES if change not in RARE]


@pytest.mark.parametrize(
    "changes",
    [
        *[
            pytest.param(OFTEN[i : i + 3], id=f"changes {i} to {i + 2}")
            for i in range(0, len(OFTEN), 3)
        ],
        *[pytest.param([change], id=change.__name__, marks=pytest.mark.slow) for change in CHANGES],
    ],
)
def test_a_step_after_a_change_runs_without_replay(changes: list[Change]) -> None:
    """One change after the other; slow tests have each alone."""
    twins = Twins(headline).warm()
    for change in changes:
        assert not twins.step(change), change.__name__
        assert twins.recovers(within=10), change.__name__


def test_gradients_at_any_address_or_with_gaps_are_replayed() -> None:
    twins = Twins(headline).warm()
    assert twins.step(lambda opt: opt.zero_grad(set_to_none=False))
    assert twins.step(gaps)
    assert twins.recovers()


REVERSED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous, as_strided": lambda t: (
        torch.as_strided(t.contiguous(), (t.numel(),), (1,)).flip(0).view(t.shape)
    ),
    "clone(memory_format=...)": lambda t: (
        torch.as_strided(t.clone(memory_format=torch.contiguous_format), (t.numel(),), (1,))
        .flip(0)
        .view(t.shape)
    ),
    "clone, as_strided": lambda t: (
        torch.as_strided(t.clone(), (t.numel(),), (1,)).flip(0).reshape(t.shape)
    ),
    "flatten": lambda t: t.flatten().flip(0).view(t.shape),
    "reshape": lambda t: t.reshape(-1).flip(0).reshape(t.shape),
    "ravel, as_strided_copy": lambda t: (
        torch.as_strided_copy(t.ravel(), (t.numel(),), (1,)).flip(0).view(t.shape)
    ),
    "empty_like": lambda t: torch.empty_like(t).copy_(t).flatten().flip(0).view(t.shape),
    "to(copy=True)": lambda t: (
        t.to(t.dtype, memory_format=torch.contiguous_format, copy=True)
        .view(-1)
        .flip(0)
        .view(t.shape)
    ),
    "as_strided with an offset": lambda t: torch.as_strided(
        t, t.shape, t.stride(), t.storage_offset()
    ).flip(0),
}
"""Functions of a tensor whose operators depend on the layout of the tensor."""


class Reversed(Transform):
    """Reverse each tensor by operators of PyTorch that depend on the layout in memory."""

    name_of_function: str

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(REVERSED[self.name_of_function])


def square_in_layout(layout: str) -> Change:
    """Give the same gradients another layout in memory."""

    def change(opt: Modular) -> None:
        for p in params_of(opt):
            assert p.grad is not None
            if layout == "transposed":
                p.grad = p.grad.t().contiguous().t()
            elif layout == "with gaps":
                p.grad = torch.cat([p.grad, p.grad], dim=1)[:, : p.shape[1]]
            elif layout == "in another place of the storage":
                p.grad = torch.cat([p.grad, p.grad])[len(p) :]

    return change


LAYOUTS = ["transposed", "with gaps", "in another place of the storage"]


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        pytest.param(function, layout, marks=() if (i + j) % 3 else pytest.mark.slow)
        for (i, function), (j, layout) in itertools.product(enumerate(REVERSED), enumerate(LAYOUTS))
    ],
)
def test_operators_that_depend_on_the_layout_are_not_replayed_for_another_layout(
    function: str, layout: str
) -> None:
    twins = Twins(lambda: [Reversed(function), LR(0.1)], shapes=[(4, 4), (3, 5)]).warm()
    other = square_in_layout(layout)
    assert not twins.step(other)
    assert twins.recovers(other, within=8)
    assert not twins.step()
    assert twins.recovers()


def test_steps_are_not_replayed_while_a_hyperparameter_is_a_tensor() -> None:
    twins = Twins(headline).warm()
    assert not any([twins.step(lr_as_tensor) for _ in range(4)])
    numbers: Change = lambda opt: [group.update(lr=0.1) for group in opt.param_groups]  # noqa: E731
    assert twins.recovers(numbers, within=4)


def test_replays_read_parameters_and_state_that_were_written_in_place() -> None:
    twins = Twins(headline).warm()

    @torch.no_grad()
    def reset(opt: Modular) -> None:
        for p in params_of(opt):
            p.fill_(0.5)
            opt.state[p]["Adam/exp_avg"].zero_()

    assert twins.step(reset)


def test_a_value_in_state_that_is_no_tensor_is_named() -> None:
    opt = model(headline())
    opt.state[params_of(opt)[0]]["note"] = "text"
    for i in range(3):
        give(opt, i)
        opt.step()
    assert replays(opt).why == (
        "state contains values of type str: store only tensors and numbers in optimizer.state[p]"
    )


class Fails(Transform):
    """u ← u, or an error if `failing` is not empty"""

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        if failing:
            raise OSError("the disk is full")
        return u


failing: list[int] = []


def test_an_error_of_a_step_does_not_delay_the_next_recording() -> None:
    opt = model([ZClip(), Fails(), Adam(), LR(0.1)])
    for i in range(5):
        give(opt, i)
        failing[:] = [i] if i == 1 else []
        with pytest.raises(OSError, match="disk") if failing else nullcontext():
            opt.step()
    assert replays(opt).count > 0
    assert not replays(opt).why


class TimesField(Transform):
    """u ← factor · u"""

    factor: Tensor

    pure = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(self.factor)


def test_replays_read_a_tensor_of_a_rule_that_changed_in_place_or_moved() -> None:
    twins = Twins(lambda: [TimesField(torch.tensor(0.5)), LR(1e-2)]).warm()

    def factor(opt: Modular) -> Tensor:
        found: Tensor = opt.chain[0].factor  # type: ignore[attr-defined]
        return found

    def move(opt: Modular) -> None:
        factor(opt).data = torch.tensor(2.0)

    assert twins.step(lambda opt: factor(opt).mul_(3.0))
    assert not twins.step(move)
    assert twins.recovers()


def test_replaced_state_in_a_group_is_noticed() -> None:
    twins = Twins(CHAINS["memory"]).warm(5)

    def change(opt: Modular) -> None:
        for group in opt.param_groups:
            held = {k: v for k, v in group["chain"].items() if k.startswith("ZClip")}
            group["chain"].update({key: value * 2 for key, value in held.items()})

    assert not twins.step(change)
    assert twins.recovers()


def test_state_that_moved_to_another_parameter_is_noticed() -> None:
    twins = Twins(headline).warm()
    other = Parameter(torch.ones(1))

    def move(opt: Modular) -> None:
        opt.state[other] = opt.state.pop(params_of(opt)[-1])

    assert not twins.step(move)


def test_a_recorded_operator_is_called_by_the_public_function_of_torch() -> None:
    """A replay calls it in half the time that the operator takes."""
    x = torch.ones(2)
    assert _quicker(torch.ops.aten.add.Tensor, (x, x), {}) is torch.add
    assert _quicker(torch.ops.aten._foreach_add_.List, ([x], [x]), {}) is torch._foreach_add_
    assert torch.equal(x, torch.ones(2))


class Mine(Transform):
    """A rule whose update differs from step to step."""

    calls: int = 0

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        vars(self)["calls"] += 1
        return u.mul_(self.calls)


class Limit(NormRule):
    max_norm: Live[float]

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return float(norm.sum()) / 2


def even(step: int) -> bool:
    return step % 2 == 0


def matrices(name: str, p: Tensor) -> bool:
    return p.dim() > 1


NOT = [
    lambda: When(even, ClipNorm(1.0)),
    lambda: Accumulate(2),
    lambda: Noise(0.1),
    lambda: Lambda(torch.tanh),
    lambda: Masked(Mine(), matrices),
    Mine,
    lambda: Limit(1.0),
]


@pytest.mark.parametrize("make", NOT)
def test_links_whose_code_may_differ_from_step_to_step_are_never_replayed(make: Any) -> None:
    assert replays(model([make(), LR(0.1)])).why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan", "exact"])
def test_steps_in_half_precision_are_replayed_with_every_rounding(
    rounding: str, dtype: torch.dtype
) -> None:
    if (rounding, dtype) != ("exact", torch.float16):
        twins = Twins(headline, dtype=dtype, rounding=rounding)
        twins.warm(4)
        assert twins.recovers()  # metrics() starts the meter of "nearest", so the steps differ
        assert all([twins.step() for _ in range(2)])


@pytest.mark.parametrize("why", ["refused", "state that moves", "gradients that share memory"])
def test_steps_that_cannot_be_replayed_are_recorded_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    twins, taken = Twins(headline), []

    class Taken(StepRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            taken.append(self)
            if why == "refused":
                raise Refused(why)

    def restless(opt: Modular) -> None:
        for state in opt.state.values():
            state["Adam/exp_avg"] = state["Adam/exp_avg"].clone()

    changes = {"state that moves": restless, "gradients that share memory": shared_gradients}
    monkeypatch.setattr(compiled, "StepRecorder", Taken)
    assert not any([twins.step(changes.get(why)) for _ in range(24)])
    assert 1 <= len(taken) <= (1 if why == "refused" else 8)


MORE: dict[str, Callable[[], Chain]] = {
    "guard": lambda: [Guard(), *headline()],
    "masked": lambda: [Masked(ClipNorm(1.0), lambda name, p: p.dim() > 1), *headline()],
    "accumulate": lambda: [Accumulate(2), *headline()],
    "memory in the shape of gradients": lambda: [ClipNormByEMA(), *headline()],
    "begins anew": lambda: [ClipNorm(1.0), Reset(Adam(), 9, 4, keep=("step",)), LR(1e-2)],
}


@at_once("name", ["headline", "memory of tensors", "gradients", *MORE])
def test_gradients_are_freed_after_the_step_without_the_garbage_collector(name: str) -> None:
    opt = model({**CHAINS, **MORE}[name]())
    gc.collect()
    gc.disable()
    try:
        for i in range(4):  # the last one is a replay
            give(opt, i)
            grads = [weakref.ref(p.grad) for p in params_of(opt)]
            opt.step()
            opt.zero_grad()
            assert not any([ref() is not None for ref in grads])
    finally:
        gc.enable()


NAN: dict[str, Callable[[], Chain]] = {
    "an empty window": lambda: [SkipSpike(), *headline()],
    "entries without a sign": lambda: [Sign(), LR(1e-2)],
}


@at_once("name", NAN)
def test_recording_again_adds_nothing_to_the_cache_of_fake_tensors(name: str) -> None:
    """PyTorch caches operators by their arguments, and NaN is unequal to every earlier NaN."""
    opt, sizes, recorded = model({**CHAINS, **NAN}[name]()), [], []
    for i in range(20):
        give(opt, i)
        if i % 4 == 0:  # a step with another signature; later steps are recorded again
            params_of(opt)[0].grad = None
            replays(opt)._required = 1
        opt.step()
        sizes.append(FakeTensorMode.cache_info().size)
        recorded.append(replays(opt)._recorded)
    assert len(set(recorded) - {None}) >= 4
    assert sizes[-1] == sizes[11]


def test_an_optimizer_with_a_recorded_step_is_freed_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        opt = model(headline())
        for i in range(4):
            give(opt, i)
            opt.step()
        assert replays(opt).count
        held = weakref.ref(opt), weakref.ref(params_of(opt)[0])
        del opt
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_replays_increment_the_versions_of_parameters() -> None:
    twins = Twins(lambda: [ClipNorm(1.0), LR(0.1)]).warm()  # fused optimizers leave versions
    before = [p._version for p in params_of(twins.fast)]
    assert twins.step()
    assert all([p._version > old for p, old in zip(params_of(twins.fast), before, strict=True)])


def test_parameter_names_that_change_in_place_are_noticed() -> None:
    """The layers of dim="layer" follow from the names in each step."""
    ends = []
    for alone in (False, True):
        params = [Parameter(torch.ones(3)) for _ in range(4)]
        names = ["a.x", "a.y", "b.x", "b.y"]
        opt = Modular(
            list(zip(names, params, strict=True)), ClipNorm(0.1, dim="layer"), LR(0.1), compile=True
        )
        if alone:
            never_replayed(opt)
        for i in range(8):
            if i == 5:
                opt.param_groups[0]["param_names"][1] = "b.z"
            for j, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + i + j)
            opt.step()
        ends.append(params)
    assert all([equal(a, b) for a, b in zip(*ends, strict=True)])


def test_compiled_replays_round_low_precision_state_after_a_guard_like_a_step() -> None:
    """Kernels read vectors element by element, so one flag for all is expanded in memory."""
    twins = Twins(lambda: [Guard(), *headline()], state_dtype="bfloat16")
    for opt in twins.both:
        opt.engine.backend = "native"  # type: ignore[attr-defined]
    scales = [1.0, 1.0, 1.0, float("nan"), 2.0, float("inf"), 1.0]
    assert [twins.step(scale=scale) for scale in scales][2:] == [True] * 5
