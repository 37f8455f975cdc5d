"""What the lab offers for a run: each rule that simulate takes, a slider for each live number."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.modules.rows.row import Row
from tests.table import ROWS
from torchzero_clip import AdaGN, AdaptiveClip, ClipNorm, NormRule, Trace, ZClip, ZStat, simulate
from torchzero_clip.study.lab.rules import catalogue, moved, numbers, sliders

TRACE = Trace(
    torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) + 0.5, ["a.w", "a.b", "b"]
)
TOTAL = Trace(TRACE.total.unsqueeze(1))


def simulated(row: Row) -> bool:
    """Whether `simulate` takes some construction of a row, as of 2-norms that a run has."""
    for rule in [make() for make in row.good.values()]:
        with contextlib.suppress(ValueError, TypeError, NotImplementedError):
            simulate(TRACE, rule)
            return True
    return False


@pytest.mark.parametrize("trace", [TRACE, TOTAL], ids=["tensors", "one norm"])
def test_every_rule_that_a_run_can_be_simulated_with_is_offered(trace: Trace) -> None:
    offered = catalogue(trace)
    assert {type(rule) for rule in offered} == {row.cls for row in ROWS if simulated(row)}
    assert len(simulate(trace, *offered).metrics) == len(offered)
    assert len([rule for rule in offered if isinstance(rule, AdaptiveClip)]) == 6
    assert isinstance(offered[0], ClipNorm)


def test_of_a_run_with_one_norm_rules_are_about_everything() -> None:
    assert {rule.scope for rule in catalogue(TOTAL)} == {"global"}


@pytest.mark.parametrize("rule", catalogue(TRACE), ids=repr)
def test_a_slider_for_each_live_number_has_values_that_the_rule_takes(rule: NormRule) -> None:
    made = sliders(rule, TRACE)
    assert [slider.path for slider in made] == [path for path, _ in numbers(rule)]
    assert made
    for slider in made:
        assert slider.value in slider.positions
        assert len(slider.positions) > 10
        known = [x for x in slider.positions if x is not None]
        assert known == sorted(known)
        for value in slider.positions:
            assert dict(numbers(moved(rule, slider.path, value)))[slider.path] == value


def test_a_limit_in_norms_has_a_slider_over_the_norms_of_the_run() -> None:
    (slider,) = sliders(ClipNorm(1.0, dim="global"), TRACE)
    values = [x for x in slider.positions if x is not None]
    assert values[0] < TRACE.total.min()
    assert values[-1] >= TRACE.total.max()


def test_what_may_be_absent_can_be_moved_to_none() -> None:
    absent = {s.name: s.positions[0] for s in sliders(ZClip(), TRACE)}
    assert absent == {"alpha": 0.0, "z_thresh": 0.25, "max_norm": None}


def test_numbers_inside_a_criterion_and_a_tuple_move_too() -> None:
    assert moved(AdaptiveClip(ZStat()), ("criterion", "z_thresh"), 4.0) == AdaptiveClip(
        ZStat(z_thresh=4.0)
    )
    assert moved(AdaGN(betas=(0.7, 0.9)), ("betas", 1), 0.5) == AdaGN(betas=(0.7, 0.5))
