"""Random events between steps: whatever happens, replays are bitwise identical to other steps."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.test_replays import (
    CHAINS,
    CHANGES,
    MORE,
    Twins,
    gaps,
    give,
    loaded,
    lr_as_tensor,
    model,
    moved_state,
    no_gradients,
    other_state,
    other_step,
    params_of,
    without_state,
)
from torchzero_clip import LR, Adam, ClipNorm, Freeze, Guard, Masked, Modular, Partition, SkipSpike

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*from the checkpoint replaces:UserWarning"
)  # events change values
STEPS = int(os.environ.get("REPLAY_STEPS", "20000"))
ALSO = {
    "partition": lambda: [
        Partition({"a": Adam(), "b": ClipNorm(0.1)}, lambda name, p: "a" if p.dim() > 1 else "b"),
        LR(1e-2),
    ],
    "freeze": lambda: [Freeze(lambda name, p: p.dim() == 0), ClipNorm(1.0), Adam(), LR(1e-2)],
    "spikes": lambda: [SkipSpike(least=4), Guard(), ClipNorm(1.0), Adam(), LR(1e-2)],
}
EVERY = {**CHAINS, **MORE, **ALSO}
GUARDED = ("guard", "spikes")
NEVER_REPLAYED = ("accumulate",)
OF_ADAM = (other_state, other_step, moved_state, loaded, without_state)


def has_adam(opt: Modular) -> bool:
    """Return whether every parameter has the state of Adam."""
    return all(["Adam/exp_avg" in opt.state.get(p, {}) for p in params_of(opt)])


def scaled_state(opt: Modular) -> None:
    for state in opt.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                value.mul_(0.5)


def gaps_in_parameters(opt: Modular) -> None:
    p = params_of(opt)[0]
    wide = torch.zeros(*p.shape[:-1], 2 * p.shape[-1]) if p.dim() else torch.zeros(2)
    inner = wide[..., ::2] if p.dim() else wide[0]
    inner.copy_(p.detach())
    p.data = inner


def expanded_gradient(opt: Modular) -> None:
    p = params_of(opt)[0]
    p.grad = torch.ones(()).expand(p.shape)


def negated_gradient(opt: Modular) -> None:
    p = params_of(opt)[0]
    p.grad = torch.complex(torch.zeros(p.shape), torch.ones(p.shape)).conj().imag


def edited_metrics(opt: Modular) -> None:
    for value in opt.metrics().values():
        if value.is_floating_point():
            value.mul_(2)


def data_of_a_hook(opt: Modular) -> None:
    for p in params_of(opt):
        p.data = p.data * 0.99


def reloaded(opt: Modular) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def other_lr(opt: Modular) -> None:
    for group in opt.param_groups:
        if "lr" in group and type(group["lr"]) is float:
            group["lr"] *= 0.9


def numbers_again(opt: Modular) -> None:
    for group in opt.param_groups:
        if "lr" in group:
            group["lr"] = 1e-2


def renamed(opt: Modular) -> None:
    names = opt.param_groups[-1]["param_names"]
    names[0] = names[0] + "x"


EVENTS: list[Callable[[Modular], Any]] = [
    *[change for change in CHANGES if change.__name__ not in ("resized", "swapped")],
    gaps,
    no_gradients,
    lr_as_tensor,
    numbers_again,
    scaled_state,
    gaps_in_parameters,
    expanded_gradient,
    negated_gradient,
    edited_metrics,
    data_of_a_hook,
    reloaded,
    other_lr,
    renamed,
]


def event_of(twins: Twins, choose: random.Random, share: float) -> Callable[[Modular], Any] | None:
    """Return a random event in this share of the steps, otherwise None."""
    event = choose.choice(EVENTS) if choose.random() < share else None
    if event is not None and event.__name__ == "another_group":
        return event if len(twins.fast.param_groups) < 4 else None
    return event


def run(name: str, seed: int, steps: int) -> int:
    """Run steps of a chain with random events; return how many were replayed."""
    choose, twins, count = random.Random(seed), Twins(EVERY[name]), 0
    for _ in range(steps):
        event = event_of(twins, choose, (0.01, 0.05, 0.2)[seed % 3])
        wild = [float("nan"), float("inf")] if name in GUARDED else []
        scale = choose.choice([1.0] * 6 + [0.0, 1e-20, 1e20, *wild])

        def change(opt: Modular, event: Any = event) -> None:
            if event is not None and (event not in OF_ADAM or has_adam(opt)):
                event(opt)

        count += twins.step(change, scale)
    return count


RARE = ("memory of tensors", "two norms", "other orders", "layers", "freeze")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in RARE else ()) for x in EVERY]
)
def test_steps_with_random_events_between_them(name: str) -> None:
    count = run(name, seed=1, steps=20)
    assert (count > 6) == (name not in NEVER_REPLAYED)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_many_steps_with_random_events_between_them(name: str) -> None:
    share = -(-STEPS // len(EVERY))
    count = sum([run(name, seed, 400) for seed in range(-(-share // 400))])
    assert (count > share // 20) == (name not in NEVER_REPLAYED)


def test_a_function_of_the_user_is_called_before_each_replay() -> None:
    """It is called at least as often as without replay."""
    asked = {"fast": 0, "slow": 0}
    active = {"yes": True}
    made = iter(("fast", "slow"))

    def chain() -> Any:
        who = next(made)

        def where(name: str, p: Tensor) -> bool:
            asked[who] += 1
            return active["yes"] and p.dim() > 1

        return [Masked(ClipNorm(0.1), where), LR(0.1)]

    twins = Twins(chain).warm()
    active["yes"] = False
    assert not twins.step()
    assert twins.recovers()
    assert asked["fast"] >= asked["slow"]


def test_steps_under_autocast_and_another_default_dtype_are_replayed() -> None:
    twins = Twins(CHAINS["headline"]).warm()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert twins.step()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for opt in twins.both:
            for p in params_of(opt):
                p.grad = torch.ones(p.shape, dtype=p.dtype)
            opt.step()
    finally:
        torch.set_default_dtype(before)
    assert twins.recovers()


def test_no_fake_tensor_stays_in_the_optimizer() -> None:
    """A recording leaves none of its tensors in the optimizer or the engine."""
    from torch._subclasses.fake_tensor import FakeTensor

    for name, chain in {**MORE, **ALSO, "headline": CHAINS["headline"]}.items():
        opt = model(chain())
        for i in range(3):  # the last one is a replay
            give(opt, i)
            opt.step()
        found, seen = [], set[int]()
        ahead: list[Any] = [opt.__dict__, opt.engine.__dict__]
        while ahead:
            x = ahead.pop()
            if id(x) in seen or isinstance(x, (str, bytes, int, float, type, Parameter)):
                continue
            seen.add(id(x))
            found += [name] if isinstance(x, FakeTensor) else []
            if isinstance(x, dict):
                ahead += [*x.values()]
            elif isinstance(x, (list, tuple, set)):
                ahead += list(x)
            elif type(x).__module__.startswith("torchzero_clip"):
                slots = [
                    getattr(x, s, None)
                    for c in type(x).__mro__
                    for s in getattr(c, "__slots__", ())
                ]
                ahead += [vars(x) if hasattr(x, "__dict__") else None, *slots]
        assert not found
