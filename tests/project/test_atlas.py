"""The atlas: its gradients and measures, results that are what the code gives, its sentences."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.atlas.__main__ import RESULTS
from benchmarks.atlas.gradients import (
    AFTER,
    BEFORE,
    LATER,
    STEPS,
    TROUBLES,
    gradients,
    healthy,
    signal,
)
from benchmarks.atlas.report import FIRST, claims, complete, picture, sentences, table
from benchmarks.atlas.rules import CASES, RULES, Usual
from benchmarks.atlas.runs import Curve, Row, apart, back, measured, walk
from benchmarks.rows import read
from tests.helpers import some

ROWS: list[Row] = read(RESULTS / "atlas.csv", Row)
CURVES: list[Curve] = read(RESULTS / "atlas_curves.csv", Curve)


# ---------------------------------------------------------------------- the gradients


def test_a_healthy_gradient_is_about_one_long_and_has_the_signal_in_it() -> None:
    grads = healthy()
    assert grads.shape[0] == STEPS
    assert grads.norm(dim=-1).median().item() == pytest.approx(1.0, abs=0.05)
    along = torch.cosine_similarity(grads, signal(), dim=-1)
    assert along.mean().item() == pytest.approx(0.447, abs=0.02)  # ½ / √(¼ + 1)


@pytest.fixture(scope="module")
def runs() -> tuple[list[str], torch.Tensor]:
    return gradients()


@pytest.fixture(scope="module")
def calm() -> torch.Tensor:
    return healthy()


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_changes_what_it_says_and_the_last_step_is_a_spike(
    runs: tuple[list[str], torch.Tensor], calm: torch.Tensor, name: str
) -> None:
    names, grads = runs
    own = grads[:, names.index(name)]
    changed = (own != calm).any(1).nonzero().flatten()
    trouble = TROUBLES[name]
    if trouble.lasts:
        assert changed.tolist() == [*range(BEFORE, BEFORE + trouble.lasts), STEPS - 1]
    elif name != "heavy tails":
        assert changed.min() >= BEFORE
    assert own[-1].norm().item() == pytest.approx(trouble.level * LATER)
    if trouble.lasts == 0:
        torch.testing.assert_close(own[BEFORE:-1], trouble.level * calm[BEFORE:-1])


# ---------------------------------------------------------------------- the measures


def test_back_counts_the_steps_until_ten_in_a_row_are_close() -> None:
    away = torch.zeros(AFTER)
    assert back(away, 2.0) == 0
    away[:7], away[12] = 1.0, 0.2
    assert back(away, 2.0) == 13
    assert back(away, math.inf) == math.inf
    assert back(torch.ones(AFTER), 2.0) == math.inf


def test_what_is_apart_is_relative_and_no_number_is_infinite() -> None:
    assert apart(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0])) == 2.0
    assert apart(torch.tensor([torch.nan]), torch.ones(1)) == math.inf


@pytest.mark.parametrize("rule", some(["ZClip", "ClipNorm", "AutoClip"], one_in=3))
def test_a_run_among_others_is_as_if_alone(runs: tuple[list[str], torch.Tensor], rule: str) -> None:
    names, grads = runs
    part = grads[BEFORE - 30 : BEFORE + 10]
    many = walk(Usual(1.0, "layer"), rule, "before Adam", part)
    one = walk(Usual(1.0), rule, "before Adam", part[:, [names.index("spike ×1000")]])
    run = names.index("spike ×1000")
    torch.testing.assert_close(many.steps[:, run], one.steps[:, 0])
    assert torch.equal(many.touched[:, run], one.touched[:, 0])


# ---------------------------------------------------------------------- the results


def test_the_results_are_of_all_rules_places_and_troubles() -> None:
    assert complete(ROWS)
    assert len(CURVES) == 2 * len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", [("ZClip", "alone"), ("ClipNorm", "before Adam")])
def test_the_results_are_what_the_code_gives(case: tuple[str, str]) -> None:
    rows, curves = measured(case)
    kept = [row for row in ROWS if (row.rule, row.place) == case]
    for new, old in zip(rows, kept, strict=True):
        numbers = [value for value in vars(old).values() if isinstance(value, float)]
        again = [value for value in vars(new).values() if isinstance(value, float)]
        assert new.trouble == old.trouble
        assert again == pytest.approx(numbers, rel=2e-3, nan_ok=True)
    drawn = [curve for curve in CURVES if (curve.rule, curve.place) == case]
    assert [curve.trouble for curve in curves] == [curve.trouble for curve in drawn]


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.__name__)
def test_every_sentence_holds(claim) -> None:
    text, holds = claim(ROWS)
    assert holds, text


def test_the_page_has_five_sentences_a_line_for_each_result_and_a_picture_for_each_rule() -> None:
    assert len(sentences(ROWS)) == 5
    text = table(ROWS, {})
    assert text.count("<tr>") == len(ROWS) + 1
    assert f'data-place="before Adam" data-trouble="{FIRST}"' in text  # what it shows at first
    assert text.startswith('<div class="frame">')  # in which it scrolls
    for entry in RULES.values():
        drawn = picture(CURVES, entry.page)
        assert drawn is not None
        assert drawn.count("<polyline") == 2 * len(first_of(entry.page).places)


def first_of(page: str):
    return next(entry for entry in RULES.values() if entry.page == page)
