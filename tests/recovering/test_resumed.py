"""A run that is saved, killed and resumed is the run that went on, wherever it was saved."""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import at_once, run_each
from tests.recovering.runs import FIRST, LAST, Loader, Run, batches, differences, net
from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, Recover, WeightEMA, attach


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recover: step")
        yield


def written(x: Any) -> Any:
    """What torch.load gives back."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def few(given: Any, count: int) -> Any:
    """So many of them; the next one is not drawn."""
    for _ in range(count):
        yield next(given)


class Life:
    """A run with everything that a checkpoint has."""

    def __init__(self, chain: str, loader: bool, **options: Any) -> None:
        self.given = {k: options.pop(k) for k in ("check", "every", "keep") if k in options}
        self.run, self.loader = Run(chain, **options), Loader(batches(72))
        self.recover = self.run.recover(*([self.loader] if loader else []), **self.given)
        self.batches = self.recover.batches(self.loader)

    def train(self, count: int | None = None) -> None:
        given = self.batches if count is None else few(self.batches, count)
        self.run.train(given, self.recover)

    def saved(self, **given: Any) -> dict[str, Any]:
        python = random.getstate()
        return {
            "parts": [x.state_dict() for x in self.parts],
            "recover": self.recover.state_dict(**given),
            "torch": torch.get_rng_state(),
            "python": [python[0], list(python[1]), python[2]],
        }

    def load(self, saved: Any) -> None:
        for x, state in zip(self.parts, saved["parts"], strict=True):
            x.load_state_dict(state)
        torch.set_rng_state(saved["torch"])
        python = saved["python"]
        random.setstate((python[0], tuple(python[1]), python[2]))
        self.recover.load_state_dict(saved["recover"])

    @property
    def parts(self) -> list[Any]:
        return [self.run.model, self.run.opt, *self.run.schedules, self.loader]


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("adamw", True, {}),
    ("adamw", False, {}),
    ("adamw", True, {"fused": False}),
    ("adamw", True, {"compile": True}),
    ("ema", False, {"compile": True}),
    ("free", True, {}),
    ("large batches", True, {"state_dtype": "bfloat16"}),
    ("noise", True, {"dtype": torch.bfloat16, "rounding": "exact"}),
]


PLACES = (13, 35, FIRST + 1, LAST)
"""Behind a look, between two snapshots, and while the run is failing."""
PAIRS_OF_PLACES = [(35, LAST), (13, FIRST + 1)]
TURNS = [(case, PAIRS_OF_PLACES[i % 2]) for i, case in enumerate(CASES[::2])]
"""Every second case, and each place in every second one of these."""


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(TURNS, id="in turn"),
        pytest.param([(case, PLACES) for case in CASES], id="all", marks=pytest.mark.slow),
    ],
)
def test_a_run_saved_anywhere_is_the_run_that_went_on(rows: Any) -> None:
    run_each(saved_anywhere, "case, places", rows)


def saved_anywhere(case: Any, places: tuple[int, ...]) -> None:
    """One run that is saved at each of these places, and one that goes on from each of them."""
    chain, loader, options = case
    straight, done, saved = Life(chain, loader, **options), 0, []
    for at in places:
        straight.train(at - done)
        ring = [snapshot.progress.count for snapshot in straight.recover._ring]
        saved.append((written(straight.saved()), ring))
        done = at
    straight.train()
    ends = straight.saved()
    assert straight.recover.events
    for state, ring in saved:
        other = Life(chain, loader, **options)
        other.load(state)
        assert [snapshot.progress.count for snapshot in other.recover._ring] == ring
        other.train()
        assert differences(ends, other.saved()) == []


def test_a_checkpoint_can_be_loaded_twice() -> None:
    """Later snapshots do not write into what was loaded."""
    first = Life("adamw", True)
    first.train(35)
    saved, ends = written(first.saved()), []
    for _ in range(2):
        other = Life("adamw", True)
        other.load({**saved, "parts": copy.deepcopy(saved["parts"])})
        other.train()
        ends.append(other.saved())
    assert differences(*ends) == []


def test_a_run_saved_while_it_fails_without_its_snapshots_keeps_no_broken_weights() -> None:
    """It has no snapshot until all is well again, and says so if it is not."""
    first = Life("adamw", True)
    first.train(LAST)
    small = first.saved(snapshots=False)
    assert small["recover"]["snapshots"] == []
    other = Life("adamw", True)
    other.load(written(small))
    assert other.recover._ring == []
    assert other.recover.nbytes == 0
    bad = Loader([(x, math.nan * y) for x, y in batches(5)])
    with pytest.raises(RuntimeError, match=r"no snapshot exists yet: .* an earlier checkpoint"):
        other.run.train(bad, other.recover)


def test_a_run_without_snapshots_takes_one_at_the_next_good_look() -> None:
    first = Life("adamw", True)
    first.train(33)
    other = Life("adamw", True)
    other.load(written(first.saved(snapshots=False)))
    other.train(2)
    assert [snapshot.progress.count for snapshot in other.recover._ring] == [35]


# ---------------------------------------------------------------------- another check


def judged_by(check: int, every: int) -> tuple[Recover, nn.Linear, Modular]:
    model = nn.Linear(1, 1, bias=False)
    opt = Modular(model.parameters(), Guard(), LR(0.1))
    return Recover(opt, model, every=every, check=check, window=4), model, opt


@at_once("before, after", [(10, 2), (2, 5), (5, 10), (3, 7), (4, 1), (1, 4)])
def test_another_check_judges_all_steps_that_come(before: int, after: int) -> None:
    for at in range(13, 27):
        first, model, opt = judged_by(before, before)
        for i in range(at):
            first._moved = True
            first.step(1.0 + 0.1 * (i % 2))
        saved = written([model.state_dict(), opt.state_dict(), first.state_dict()])
        recover, model, opt = judged_by(after, after)
        for x, state in zip((model, opt, recover), saved, strict=True):
            x.load_state_dict(state)
        seen, backs = 0, []
        while not backs:
            recover._moved = True
            back = recover.step(99.0)
            backs += [back] if back else []
            seen += 1
            assert seen <= 2 * (before + after)
        assert back is not None
        assert back.step == at + seen
        assert back.to <= at


def test_another_window_and_keep_are_those_of_now() -> None:
    first, model, opt = judged_by(1, 1)
    for _ in range(9):
        first.step(1.0)
    again = Recover(opt, model, every=1, check=1, window=2, keep=1)
    again.load_state_dict(written(first.state_dict()))
    assert len(again.now.losses) == 2
    assert [snapshot.progress.count for snapshot in again._ring] == [9]


# ---------------------------------------------------------------------- what comes along


def test_a_handle_with_its_optimizer_and_random_numbers_of_numpy_come_back() -> None:
    def life() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        handle = attach(opt, Guard(), ClipNorm(1.0), after=WeightEMA(0.9))
        return model, opt, handle, Recover(handle, model, every=2, check=2)

    def steps(run: tuple[Any, ...], count: int, loss: float) -> None:
        model, opt, _, recover = run
        for _ in range(count):
            opt.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            opt.step()
            recover.step(loss)

    run = life()
    steps(run, 2, 1.0)
    there = {key: t.clone() for key, t in run[0].state_dict().items()}
    there_too, drawn = repr(run[1].state_dict()), np.random.rand()
    steps(run, 1, 1.0)
    saved = written([x.state_dict() for x in run])
    other = life()
    for x, state in zip(other, saved, strict=True):
        x.load_state_dict(state)
    assert differences(there, other[0].state_dict()) != []
    steps(other, 1, math.nan)
    assert differences(there, other[0].state_dict()) == []
    assert repr(other[1].state_dict()) == there_too
    assert np.random.rand() == drawn


def test_state_and_groups_that_began_behind_the_snapshot_are_gone() -> None:
    def life() -> tuple[Any, Modular, Recover]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        opt = Modular(model[0].parameters(), Adam(), LR(0.1))
        return model, opt, Recover(opt, model, every=2, check=2)

    def step(run: Any, loss: float) -> None:
        run[1].zero_grad()
        run[0](torch.ones(3, 2)).sum().backward()
        run[1].step()
        run[2].step(loss)

    run = life()
    step(run, 1.0)
    step(run, 1.0)
    run[1].add_param_group({"params": list(run[0][1].parameters())})
    step(run, 1.0)
    saved = written([x.state_dict() for x in run])
    other = life()
    other[1].add_param_group({"params": list(other[0][1].parameters())})
    for x, state in zip(other, saved, strict=True):
        x.load_state_dict(state)
    for each in (run, other):
        step(each, math.nan)
        assert [p in each[1].state for p in each[0].parameters()] == [True, True, False, False]
        assert len(each[1].param_groups) == 1
    assert differences(run[0].state_dict(), other[0].state_dict()) == []


def test_snapshots_of_another_run_are_an_error() -> None:
    model = nn.Linear(2, 2)
    opt = Modular(model.parameters(), Adam(), LR(0.1))
    recover = Recover(opt, model, every=1, check=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    recover.step(1.0)
    later = Modular(model.parameters(), Adam(), LR(0.1))  # whose state is not loaded yet
    with pytest.raises(ValueError, match="do not match this model, optimizer and parts"):
        Recover(later, model, every=1, check=1).load_state_dict(recover.state_dict())
