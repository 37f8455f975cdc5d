"""SkipSpike: what stands out from the last steps does not happen."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import same
from torchzero_clip import LR, Adam, Guard, Modular, SkipSpike, attach, spec, to_floats

inf, nan = math.inf, math.nan


class Run:
    """A parameter of one entry, whose gradients have these norms."""

    def __init__(self, guard: Any, **kwargs: Any) -> None:
        self.p = Parameter(torch.zeros(1))
        self.opt = Modular([self.p], guard, LR(1.0), **kwargs)

    def step(self, norm: float, loss: float | None = None) -> bool:
        """A step; returns whether it happened."""
        self.p.grad = torch.tensor([norm])
        if loss is not None:
            self.opt.report(loss=torch.tensor(loss))
        before = self.p.item()
        self.opt.step()
        assert self.opt.skipped() == (self.p.item() == before) or norm == 0
        return not self.opt.skipped()

    def window(self, name: str = "norms") -> list[float]:
        held = self.opt.param_groups[0]["chain"][f"SkipSpike/{name}"]
        return [x for x in held.tolist() if not math.isnan(x)]

    @property
    def why(self) -> float:
        numbers = to_floats(self.opt.metrics())
        found = numbers["SkipSpike/why"]
        assert isinstance(found, float)
        return found


@pytest.mark.parametrize(("norm", "happens"), [(7.99, True), (8.01, False)])
def test_a_step_may_be_six_deviations_above_the_mean(norm, happens):
    run = Run(SkipSpike(window=3, least=3))
    assert all([run.step(x) for x in (1.0, 2.0, 3.0)])
    assert run.step(norm) is happens
    assert run.why == (0 if happens else 3)


def test_nothing_is_skipped_before_there_are_enough_values():
    run = Run(SkipSpike(window=8, least=4))
    assert all([run.step(x) for x in (1.0, 2.0, 1.0, 1e6)])
    assert run.window() == [1, 2, 1, 1e6]


def test_equal_values_set_no_limit():
    run = Run(SkipSpike(window=4, least=2, sigmas=1.0))
    assert all([run.step(x) for x in (0.1, 0.1, 0.1, 100.0)])


def test_the_window_forgets_the_oldest():
    run = Run(SkipSpike(window=3, least=3, sigmas=100.0))
    assert all([run.step(x) for x in (1.0, 2.0, 3.0, 4.0)])
    assert run.window() == [2, 3, 4]


def test_skipped_values_stay_out_until_patience_ends():
    run = Run(SkipSpike(window=4, least=3, patience=2))
    for x in (1.0, 2.0, 3.0):
        run.step(x)
    assert not run.step(100.0)
    assert not run.step(100.0)
    assert run.window() == [1, 2, 3]
    assert not run.step(100.0)  # the third in a row counts
    assert run.window() == [1, 2, 3, 100]
    assert run.step(100.0)  # and so the new level is followed: 26.5 + 6 · 49


def test_a_step_that_happens_begins_a_new_row():
    run = Run(SkipSpike(window=4, least=3, patience=2))
    for x in (1.0, 2.0, 3.0, 100.0, 100.0, 2.0, 100.0, 100.0):
        run.step(x)
    assert run.window() == [1, 2, 3, 2]


def test_all_values_are_kept_where_that_is_asked_for():
    run = Run(SkipSpike(window=4, least=3, keep_skipped=True))
    for x in (1.0, 2.0, 3.0):
        run.step(x)
    assert not run.step(100.0)
    assert run.window() == [1, 2, 3, 100]


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_no_number_is_skipped_and_never_enters(bad, keep):
    run = Run(SkipSpike(window=4, least=3, patience=1, keep_skipped=keep))
    run.step(1.0)
    assert not any([run.step(bad) for _ in range(4)])
    assert run.why == 1
    assert run.window() == [1]
    assert run.step(2.0)


# ---------------------------------------------------------------------- the loss


def test_a_loss_that_stands_out_skips_the_step():
    run = Run(SkipSpike(window=3, least=3))
    for x in (1.0, 2.0, 3.0):
        run.step(x, loss=-x)
    assert run.window("losses") == [-1, -2, -3]
    assert not run.step(2.0, loss=4.01)
    assert run.why == 4
    assert (run.window(), run.window("losses")) == ([1, 2, 3], [-1, -2, -3])
    assert run.step(2.0, loss=3.99)


def test_a_step_without_a_loss_is_judged_by_its_norm():
    run = Run(SkipSpike(window=3, least=2))
    run.step(1.0, loss=1.0)
    run.step(2.0)
    run.step(3.0, loss=2.0)
    assert (run.window(), run.window("losses")) == ([1, 2, 3], [1, 2])


def test_a_loss_that_is_nan_skips_the_step():
    run = Run(SkipSpike())
    assert not run.step(1.0, loss=nan)
    assert run.why == 1
    assert run.step(1.0)  # of that step nothing was told


@pytest.mark.parametrize("attached", [False, True])
def test_the_loss_of_a_closure_is_told_by_itself(attached):
    p = Parameter(torch.ones(1))
    if attached:
        opt: torch.optim.Optimizer = torch.optim.SGD([p], lr=0.1)
        holder: Any = attach(opt, SkipSpike())
    else:
        opt = holder = Modular([p], SkipSpike(), LR(0.1))

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = 3 * p.sum()
        loss.backward()
        return loss

    opt.step(closure)
    losses = holder.param_groups[0]["chain"]["SkipSpike/losses"]
    assert losses[-1] == 3
    assert not losses.requires_grad


def test_a_report_is_of_one_step_and_a_number():
    opt = Run(SkipSpike()).opt
    with pytest.raises(
        TypeError, match="loss= must be a number or a tensor with one element, got None"
    ):
        opt.report(loss=None)
    with pytest.raises(TypeError, match="loss= must be a number or a tensor with one element,"):
        opt.report(loss=torch.ones(2))


# ---------------------------------------------------------------------- beside plain numbers


@pytest.mark.parametrize("seed", range(3))
def test_it_skips_what_the_formula_in_plain_numbers_skips(seed):
    generator = torch.Generator().manual_seed(seed)
    run = Run(SkipSpike(window=6, least=3, sigmas=2.0, patience=3), fused=False)
    state = spec.SpikeState()
    levels = torch.rand(300, generator=generator).mul(5).exp()
    levels[::17] = nan
    for x in levels.tolist():
        happens, state = spec.skip_spike(x, state, window=6, least=3, sigmas=2.0, patience=3)
        assert run.step(x) is happens, x
        assert run.window() == pytest.approx(list(state.values))


def test_the_formula_in_plain_numbers_is_that_of_the_statistics_module():
    values = [1.0, 4.0, 2.0, 8.0]
    limit = statistics.mean(values) + 6 * statistics.stdev(values)
    for x in (limit - 0.001, limit + 0.001):
        happens, _ = spec.skip_spike(x, spec.SpikeState(tuple(values)), least=3)
        assert happens is (x < limit)


# ---------------------------------------------------------------------- a guard before it


def test_what_another_guard_skips_is_not_seen():
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    first = Modular([p], Guard(), SkipSpike(window=3, least=2), Adam(), LR(0.1))
    other = Modular([q], SkipSpike(window=3, least=2), Adam(), LR(0.1))
    for x in (1.0, nan, 2.0, nan):
        p.grad = torch.tensor([x])
        first.step()
        if x == x:
            q.grad = torch.tensor([x])
            other.step()
    same([p], [q])
    mine, theirs = (opt.param_groups[0]["chain"] for opt in (first, other))
    for name in ("skipped", "consecutive", "norms"):
        same(mine[f"SkipSpike/{name}"], theirs[f"SkipSpike/{name}"])
    assert mine["Guard/skipped"] == 2
