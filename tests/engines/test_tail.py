"""The tail of a chain is checked in every step: what a program changes between steps is right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.engines.accelerated import Accelerated
from tests.helpers import at_once
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipValue,
    Guard,
    Lambda,
    Masked,
    Modular,
    Momentum,
    Partition,
    Scale,
    Transform,
    WeightDecay,
)
from torchzero_clip.core.plan import Tail
from torchzero_clip.engines import Eager

SHAPES = [(4, 3), (4,), (2, 3)]
STEPS = 7
CHANGED = 4  # the step before which something changes

CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "adam": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(0.01)],
    "momentum": lambda: [ClipNorm(0.5, dim="global"), Momentum(0.9), LR(0.01)],
    "descent": lambda: [ClipNorm(0.5, dim="global"), WeightDecay(0.1), LR(0.01)],
    "each group": lambda: [ClipNorm(0.5, dim="group"), Adam(amsgrad=True), LR(0.01)],
    "gradients": lambda: [ClipNorm(0.5, dim="global", target="grad"), Adam(), LR(0.01)],
}
ENGINES: dict[str, Callable[[], Any]] = {
    "plain": lambda: Eager(fuses=False),
    "default": Eager,
    "accelerator": Accelerated,
}
Change = Callable[[Modular, Sequence[Parameter], int], None]


def transposed(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Give a gradient whose memory is in another order."""
    if step == CHANGED:
        p = params[0]
        assert p.grad is not None
        p.grad = p.grad.t().contiguous().t()


def rate_of_zero(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    for group in opt.param_groups:
        group["lr"] = 0.0 if step == CHANGED else 0.01


def rate_in_a_tensor(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    for group in opt.param_groups:
        group["lr"] = torch.tensor(0.02) if step >= CHANGED else 0.01


def no_gradient(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    if step == CHANGED:
        params[1].grad = None


def other_memory(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Replace the memory of a parameter by memory in another order."""
    if step == CHANGED:
        params[0].data = params[0].data.t().contiguous().t()
    if step == CHANGED + 1:
        params[0].data = params[0].data.contiguous() * 2
        params[1].data = params[1].data.clone()


def other_state(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Replace tensors of the state by tensors whose memory is in another order."""
    if step == CHANGED:
        state = opt.state[params[0]]
        for key, value in state.items():
            if value.dim() == 2:
                state[key] = value.t().contiguous().t()


def shared_memory(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Give two gradients in the same memory."""
    if step == CHANGED:
        whole = torch.arange(1.0, 13.0, dtype=params[0].dtype)
        params[0].grad = whole.view(4, 3)
        params[1].grad = whole[2:6]


def in_the_parameter(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Give a gradient in the memory of a parameter."""
    if step == CHANGED:
        params[1].grad = params[1].data


def within_the_limit(opt: Modular, params: Sequence[Parameter], step: int) -> None:
    """Give gradients that the limit leaves as they are."""
    if step == CHANGED:
        for p in params:
            assert p.grad is not None
            p.grad *= 1e-3


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        transposed, rate_of_zero, rate_in_a_tensor, no_gradient, other_memory, other_state,
        shared_memory, in_the_parameter, within_the_limit,
    )
}  # fmt: skip


def trained(
    chain: Sequence[Transform], change: Change, engine: Any, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return parameters, gradients and state after some steps, in float64."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    opt = Modular([{"params": params[:2]}, {"params": params[2:]}], *chain)
    opt.engine = engine
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        change(opt, params, step)
        opt.step()
    grads = [p.grad for p in params if p.grad is not None]
    state = [t for p in params for t in opt.state[p].values()]
    return [t.detach().double().contiguous() for t in (*params, *grads, *state)]


@functools.cache
def plainly(chain: str, change: str, dtype: torch.dtype) -> list[Tensor]:
    """Return what plain steps come to."""
    return trained(CHAINS[chain](), CHANGES[change], ENGINES["plain"](), dtype)


@pytest.mark.parametrize("change", CHANGES)
@at_once("case", [(chain, engine) for chain in CHAINS for engine in ("default", "accelerator")])
def test_what_changes_between_steps_is_seen(case: tuple[str, str], change: str) -> None:
    chain, engine = case
    found = trained(CHAINS[chain](), CHANGES[change], ENGINES[engine]())
    plain = plainly(chain, change, torch.float32)
    torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-6)
    exact = plainly(chain, change, torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@at_once("case", [(chain, engine) for chain in CHAINS for engine in ENGINES])
def test_a_guard_that_skips_a_step_leaves_all_as_it_was(case: tuple[str, str]) -> None:
    chain, engine = case

    def corrupted(opt: Modular, params: Sequence[Parameter], step: int) -> None:
        if step == CHANGED:
            assert params[0].grad is not None
            params[0].grad[0] = torch.nan

    def absent(opt: Modular, params: Sequence[Parameter], step: int) -> None:
        if step == CHANGED:
            opt.zero_grad()

    links = [Guard(), *CHAINS[chain]()]
    found = trained(links, corrupted, ENGINES[engine]())
    expected = trained([Guard(), *CHAINS[chain]()], absent, ENGINES[engine]())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def calls(monkeypatch: pytest.MonkeyPatch, name: str = "adamw") -> list[Any]:
    """Return a list that gets the gradients of each call of torch's fused optimizer."""
    seen, kernel = [], getattr(torch, f"_fused_{name}_")

    def noted(params: Any, grads: Any, *args: Any, **options: Any) -> None:
        seen.append(grads)
        kernel(params, grads, *args, **options)

    monkeypatch.setattr(torch, f"_fused_{name}_", noted)
    return seen


def test_the_call_is_made_in_every_step_but_the_one_with_a_transposed_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = calls(monkeypatch)
    trained(CHAINS["adam"](), transposed, Eager())
    assert len(seen) == 2 * STEPS - 1  # a call for each of two groups


def test_a_factor_of_one_leaves_the_gradients_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    p = Parameter(torch.ones(3))
    opt = Modular([p], ClipNorm(10.0, dim="global"), Adam(), LR(0.1))
    p.grad = torch.ones(3)
    opt.step()
    assert seen[0][0] is p.grad


# ---------------------------------------------------------------------- the plan


def named(tail: Tail) -> tuple[str, ...]:
    """Return the names of the norm rule and of the links of a tail."""
    factor = () if tail.factor is None else (f"{tail.factor.path}:",)
    return (*factor, *[link.path for link in tail.links])


PLANS: dict[str, tuple[list[Transform], set[tuple[str, ...]]]] = {
    "adamw": (CHAINS["adam"](), {
        ("ClipNorm:", "Adam", "WeightDecay", "LR"), ("WeightDecay", "LR"), ("LR",),
    }),
    "a norm of each tensor": ([ClipNorm(1.0), Adam(), LR(0.1)], {("Adam", "LR"), ("LR",)}),
    "values": ([ClipValue(1.0), LR(0.1)], {("LR",)}),
    "read": ([Adam(), ClipNorm(1.0, dim="global"), LR(0.1)], {("ClipNorm:", "LR")}),
    "read at the end": ([Adam(), LR(0.1), ClipNorm(1.0, dim="global")], set()),
    "any function": ([Adam(), LR(0.1), Lambda(torch.tanh)], set()),
    "no kernel": ([Momentum(0.9, dampening=0.5), LR(0.1)], {("LR",)}),
    "cautious decay": ([Adam(), WeightDecay(0.1, cautious=True), LR(0.1)], {("LR",)}),
    "a named chain": ([Chain(Adam(), Scale(2.0), name="rule"), LR(0.1)], {
        ("rule/Adam", "rule/Scale", "LR"), ("rule/Scale", "LR"), ("LR",),
    }),
    "some of the parameters": ([Masked(Adam(), lambda n, p: True), LR(0.1)], {
        ("Masked/Adam", "LR"), ("LR",),
    }),
    "kinds": ([Partition({"a": Adam(), "b": Chain(ClipValue(1.0))}, lambda n, p: "a"), LR(0.1)], {
        ("Partition/a", "LR"), ("LR",),
    }),
}  # fmt: skip


@at_once("name", PLANS)
def test_the_plan_of_a_chain(name: str) -> None:
    chain, expected = PLANS[name]
    opt = Modular([Parameter(torch.ones(2))], *chain)
    assert set(map(named, opt._plan.tails.values())) == expected
