"""Recover: a run that goes wrong goes back, and on as if the bad batches had not been."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import at_once, run_each
from tests.recovering.runs import CHAINS, FIRST, LAST, Loader, Run, batches, differences

MORE: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"state_dtype": "bfloat16"}),
    ("adamw", {"dtype": torch.bfloat16, "rounding": "exact"}),
    ("ema", {"dtype": torch.bfloat16, "rounding": "stochastic"}),
]
CASES = [(chain, {}) for chain in CHAINS] + MORE


def recovered(run: Run, given: Any, *parts: Any, **options: Any) -> Any:
    """The run with Recover, which warns of each way back."""
    recover = run.recover(*parts, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recover: step")
        run.train(recover.batches(given), recover)
    return recover


def tensors(run: Run) -> list[Tensor]:
    """Those of a model and of the state of its optimizer."""
    states = [t for state in run.opt.state.values() for t in state.values()]
    return [t for t in [*run.model.state_dict().values(), *states] if isinstance(t, Tensor)]


FEW = [("adamw", {}), ("free", {}), *MORE[-1:]]
"""Replayed, of weights at which it evaluates, and with random rounding."""


@pytest.mark.parametrize(
    ("cases", "compile"),
    [
        pytest.param(CASES, False, id="eager"),
        pytest.param(FEW, True, id="compiled"),
        pytest.param(
            [case for case in CASES if case not in FEW],
            True,
            id="others compiled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_behind_a_way_back_it_is_the_run_of_the_snapshot_with_the_batches_that_came_next(
    cases: list[tuple[str, dict[str, Any]]], compile: bool
) -> None:
    run_each(functools.partial(goes_back, compile=compile), "chain, options", cases)


def goes_back(chain: str, options: dict[str, Any], compile: bool) -> None:
    run = Run(chain, **options, compile=compile)
    recover = recovered(run, iter(batches(72)))
    assert {back.to for back in recover.events} == {40}
    gone = range(41, 41 + sum([back.left_out for back in recover.events]))
    assert {FIRST, LAST} <= {*gone}
    plain = Run(chain, **options, compile=compile)
    plain.train([batch for i, batch in enumerate(batches(72), 1) if i not in gone])
    assert differences(plain.all(), run.all()) == []


@at_once("chain, compile", [("adamw", False), ("free", True), ("noise", False)])
def test_a_loader_goes_back_as_well_and_the_good_batches_come_again(
    chain: str, compile: bool
) -> None:
    run, loader = Run(chain, compile=compile), Loader(batches(72))
    recover = recovered(run, loader, loader)
    gone = sum([back.left_out for back in recover.events])
    assert {back.to for back in recover.events} == {40}
    assert gone <= LAST - FIRST + 3  # the bad ones, and some behind them that the wreck was bad at
    assert recover.now.count == 72 - gone
    plain = Run(chain, compile=compile)
    plain.train([batch for i, batch in enumerate(batches(72), 1) if i not in recover.now.left_out])
    assert differences(plain.all(), run.all()) == []


def test_without_trouble_a_run_is_what_it_is_without_recover() -> None:
    run, given = Run("adamw", compile=True), batches(60, bad=())
    assert recovered(run, given).events == []
    found, plain = run.all(), Run("adamw", compile=True)
    plain.train(given)
    assert differences(plain.all(), found) == []


def test_steps_are_repeated_behind_a_way_back_as_before_it() -> None:
    run = Run("adamw", compile=True)
    recover = recovered(run, iter(batches(70)))
    plain = Run("adamw", compile=True)
    plain.train(batches(recover.now.count, bad=()))
    assert recover.events
    said = [opt.explain().splitlines()[-2] for opt in (plain.opt, run.opt)]
    assert said == [f"Steps are replayed from a recording, {recover.now.count - 2} so far."] * 2


def test_state_comes_back_into_its_own_memory() -> None:
    run = Run("adamw")
    recover = run.recover()
    run.train(batches(40, bad=()), recover)
    where = [t.data_ptr() for t in tensors(run)]
    run.train(batches(10, bad=()))
    with pytest.warns(UserWarning, match="asked for"):
        recover._go_back("asked for")
    assert [t.data_ptr() for t in tensors(run)] == where


def test_state_that_was_replaced_since_is_what_it_was() -> None:
    """As a checkpoint that is loaded in between replaces it."""
    run = Run("ema")
    recover = run.recover()
    run.train(batches(40, bad=()), recover)
    before = run.all()
    run.train(batches(7, bad=()))
    run.opt.load_state_dict(run.opt.state_dict())
    run.train(batches(7, bad=()))
    with pytest.warns(UserWarning, match="asked for; rolled back to step 40"):
        recover._go_back("asked for")
    assert differences(before, run.all()) == []


def test_a_snapshot_copies_each_tensor_once_into_memory_that_is_there() -> None:
    run = Run("ema")
    recover = run.recover(keep=1)
    run.train(batches(40, bad=()), recover)
    copies, made = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            out = function(*args, **(kwargs or {}))
            name = function.name().partition(".")[0]
            copies.extend([out.numel()] * (name == "aten::copy_"))
            made.extend([name] * (isinstance(out, Tensor) and name.startswith("aten::empty")))
            return out

    with Watch():
        recover._ring[-1].take(60)
    chains = [t for group in run.opt.param_groups for t in group["chain"].values()]
    chains += [t for state in run.opt.state.values() for t in state.values()]
    rows = [*run.model.parameters(), *run.model.buffers(), *chains]
    once = {id(t): t.numel() for t in rows if isinstance(t, Tensor)}
    assert sorted(copies) == sorted(once.values())
    assert made == []
