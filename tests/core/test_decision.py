"""Decisions by hand: what a rule makes of norms, without a tensor that is read or written."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from torchzero_clip.core.decision import Cells, UnitState, decide, divisor

NORMS = torch.tensor([0.0, 3.0, 4.0, 8.0, math.inf, math.nan], dtype=torch.float64)


class Rule:
    """A limit as it is given; the memory is the norm before and after."""

    def __init__(self, limit: Tensor | float, *, sets_norm: bool = False, min_size: int = 0):
        self.given, self.sets_norm, self.min_size = limit, sets_norm, min_size

    def limit(self, norm: Tensor, state: UnitState, group: dict[str, Any]) -> Tensor | float:
        return self.given * group["factor"]

    def observe(
        self, norm: Tensor, clipped: Tensor, state: UnitState, group: dict[str, Any]
    ) -> UnitState:
        return {"before": norm, "after": clipped}


class Small(Cells):
    def too_small(self, size: int) -> Tensor:
        return torch.tensor([n < size for n in (1, 1, 1, 9, 9, 9)])


def test_norms_above_a_limit_are_divided_down_to_it_and_others_by_one() -> None:
    expected = torch.tensor([1.0, 1, 1, 2, math.inf, math.nan], dtype=torch.float64)
    torch.testing.assert_close(divisor(Rule(4.0), NORMS, 4.0, Cells()), expected, equal_nan=True)


def test_a_rule_that_sets_norms_also_brings_small_ones_up() -> None:
    made = divisor(Rule(4.0, sets_norm=True), NORMS[:4], 4.0, Cells())
    assert made.tolist() == [1, 0.75, 1, 2]


def test_a_limit_of_infinity_leaves_every_norm_and_one_of_zero_none() -> None:
    for limit in (math.inf, torch.full((6,), math.inf, dtype=torch.float64)):
        assert divisor(Rule(limit), NORMS, limit, Cells()).tolist() == [1] * 6
    assert divisor(Rule(0.0), NORMS[:3], 0.0, Cells()).tolist() == [1, math.inf, math.inf]


def test_a_computed_limit_of_nothing_over_nothing_leaves_zeros() -> None:
    limit = torch.full((4,), math.nan, dtype=torch.float64)
    made = divisor(Rule(limit), NORMS[:4], limit, Cells())
    assert made[0] == 1
    assert made[1:].isnan().all()


def test_norms_that_are_squares_have_roots_as_divisors() -> None:
    cells = Cells()
    cells.degree = 2
    assert divisor(Rule(2.0), NORMS[3:4], 2.0, cells).item() == 2.0
    assert cells.after(NORMS[3:4], [torch.tensor([2.0])]).item() == 2.0


def test_units_that_are_too_small_are_divided_by_one() -> None:
    assert divisor(Rule(1.0, min_size=2), NORMS, 1.0, Small())[:4].tolist() == [1, 1, 1, 8]


def test_every_group_has_its_limit_and_the_memory_is_that_of_the_first() -> None:
    state = {"before": torch.ones(6), "after": torch.ones(6)}
    groups = [{"factor": 1.0}, {"factor": 2.0}]
    made = decide(Rule(4.0), NORMS, state, groups, Cells())
    assert made.limits == [4.0, 8.0]
    assert [row[3].item() for row in made.divisors] == [2, 1]
    assert made.state["before"].tolist() == [0, 3, 4, 8, 1, 1]  # what is no number is forgotten
    assert made.state["after"].tolist() == [0, 3, 4, 4, 1, 1]
    assert state["before"].tolist() == [1] * 6  # a decision changes nothing


def test_without_memory_nothing_is_remembered() -> None:
    made = decide(Rule(4.0), NORMS, {}, [{"factor": 1.0}], Cells())
    assert made.state == {}
    assert made.norm is NORMS


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (None, TypeError, "observe must return a dict, got None"),
        ({"after": 1.0}, TypeError, "observe must return tensors, got 1.0 for 'after'"),
        (
            {"other": NORMS},
            KeyError,
            r"observe returned the keys \['other'\], but init_unit has only .*'after', 'before'",
        ),
    ],
)
def test_what_observe_may_return_is_a_sentence(made: Any, error: Any, words: str) -> None:
    rule = Rule(4.0)
    rule.observe = lambda *_: made  # type: ignore[method-assign]
    state = {"before": torch.ones(6), "after": torch.ones(6)}
    with pytest.raises(error, match=words):
        decide(rule, NORMS, state, [{"factor": 1.0}], Cells())


@pytest.mark.parametrize("limit", [None, "1.0", [1.0]])
def test_a_limit_is_a_number(limit: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"return a tensor or a number, got {limit!r}")):
        divisor(Rule(4.0), NORMS, limit, Cells())
