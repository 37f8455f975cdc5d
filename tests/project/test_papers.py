"""Results of papers: runs that come out the same again, and a page that says what files do."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rows import read, write
from examples.published.charts import Panel, Scale
from examples.published.study import ENOUGH, NAMES, Results, Row, Study, of, one, results, told
from examples.published.tables import TABLES, Parts, Regression, least, table
from scripts.pages import drawings
from tests.helpers import ROOT, at_once, some

PAGE = (ROOT / "docs" / "papers.md").read_text()
SHORT: dict[str, dict[str, Any]] = {
    "heavy_tails": {"steps": 10},
    "grokking": {"steps": 1},
    "prodigy": {"epochs": 1},
    "schedule_free": {"epochs": 1},
    "large_batches": {"epochs": 1},
    "batch_rates": {"epochs": 1},
    "smoothness": {"steps": 2},
    "soap": {"steps": 2},
}
CASE = {"prodigy": "iris", "schedule_free": "iris", "large_batches": "256", "batch_rates": "0.5"}


def short(name: str, seed: int) -> Row:
    """A short run of a study."""
    study, threads = of(name), torch.get_num_threads()
    case = CASE.get(name, next(iter(study.cases)))
    method = study.cases[case][-1]
    row = one(name, case, method, study.rates(case, method)[0], seed, **SHORT[name])
    torch.set_num_threads(threads)
    return row


@pytest.mark.parametrize("name", NAMES)
def test_a_run_measures_every_column(name: str) -> None:
    numbers = short(name, 0).numbers
    assert all(map(math.isfinite, numbers))
    for column in of(name).columns.values():
        column(numbers)


@pytest.mark.parametrize("name", some([*NAMES], one_in=8))
def test_two_runs_of_a_seed_measure_the_same_and_another_seed_does_not(name: str) -> None:
    first, again, other = (short(name, seed) for seed in (0, 0, 1))
    assert first.values == again.values != other.values


@at_once("name", NAMES)
def test_a_script_reads_in_a_minute(name: str) -> None:
    lines = (ROOT / "examples" / "published" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 100
    assert f"examples/published/{name}.py" in PAGE


# ---------------------------------------------------------------------- a study


def run(case: str, method: str, rate: float, seed: int) -> list[float]:
    """A loss that is least at a rate of 100, and better for the second method."""
    return [abs(math.log10(rate) - 2) + (method == "first") + 0.01 * seed]


STUDY = Study(
    name="none",
    cases={"": ("first", "second", "free")},
    rates=lambda case, method: (1.0,) if method == "free" else (0.1, 1.0, 10.0),
    run=run,
    score=lambda values: values[0],
    columns={"loss": lambda values: values[0]},
    against="first",
    picture=lambda found: "",
)


def finished(seeds: int) -> Results:
    """All that has to run, in rounds, as the command does it."""
    rows: list[Row] = []
    while wanted := Results(STUDY, rows).missing(seeds):
        rows += [Row(*key, 0.0, f"{run(*key)[0]:.4g}") for key in wanted]
    return Results(STUDY, rows)


def test_rates_are_searched_on_seeds_of_their_own_and_beyond_an_end_that_is_best() -> None:
    found = finished(3)
    assert found.grid("", "first") == [0.1, 1.0, 10.0, 100.0, 1000.0]
    assert {m: found.best("", m) for m in STUDY.cases[""]} == {
        "first": 100.0, "second": 100.0, "free": 1.0
    }  # fmt: skip
    assert found.seeds == 3
    assert {*found.scores("", "first")} == {0, 1, 2}
    assert not [row for row in found.rows if row.method == "free" and row.seed == 100]


def test_a_stopped_study_goes_on_with_what_is_missing() -> None:
    whole = finished(3)
    for count in range(len(whole.rows)):
        part = Results(STUDY, whole.rows[:count])
        assert part.missing(3)[0] not in [row.key for row in part.rows]
    assert {row.key for row in finished(10).rows} > {row.key for row in whole.rows}


def test_a_file_that_was_stopped_before_its_first_run_gets_its_heading(tmp_path: Path) -> None:
    file, row = tmp_path / "none.csv", finished(3).rows[0]
    file.touch()
    for _ in range(2):
        write(file, Row, [row], more=True)
    assert read(file, Row) == [row, row]


def test_of_few_seeds_nothing_is_claimed() -> None:
    few, many = finished(3), finished(ENOUGH)
    key = "", "second", "first"
    assert told(few.comparisons[key]) == "−1 (−1 to −1)"
    assert "better" not in few.table()
    assert told(many.comparisons[key]) == "1 better (1 to 1; p = 0.0039)"
    assert few.cell("second", "loss") == "0.01"
    assert few.cell("second", "against first") == told(few.comparisons[key])


def test_a_run_that_diverged_is_worse_than_any_and_counted() -> None:
    found = finished(3)
    lost = [replace(r, values="nan") if r.key[1:] == ("first", 100.0, 1) else r for r in found.rows]
    assert Results(STUDY, lost).cell("first", "loss") == "1.02, ∞ in 1 of 3"


def test_each_question_is_corrected_for_its_own_comparisons() -> None:
    """The comparisons of the table are one family, those of a further question another."""
    found = finished(ENOUGH)
    pairs = found.scores("", "second"), found.scores("", "first")
    asked = replace(STUDY, further=lambda _: {"again": {"one": pairs}})
    made = Results(asked, found.rows).comparisons
    assert made["again", "one"].family == 1
    assert made["", "second", "first"].family == 2
    assert made["", "second", "first"].corrected == 2 * made["again", "one"].corrected
    assert "- again: one: 1 better (1 to 1; p = 0.002)" in Results(asked, found.rows).table()


def test_runs_that_fail_are_counted_and_not_measured() -> None:
    """A run of the second method comes to no result, although its score has a number."""
    failing = replace(STUDY, result=lambda v: v[0] if v[0] > 0.5 else math.inf, failing="not done")
    found = Results(failing, finished(ENOUGH).rows)
    assert (
        told(found.comparisons["", "second", "first"])
        == "worse (10 of 10 not done, against 0 of 10; p = 0.0039)"
    )


def test_a_case_without_tests_has_its_numbers_alone() -> None:
    found = Results(replace(STUDY, untested=("",)), finished(ENOUGH).rows)
    assert found.comparisons == {}
    assert "p = " not in found.table()
    assert "| second | 100 | 0.045 |" in found.table()


def test_a_column_may_show_the_least_and_the_largest_seed() -> None:
    found = Results(replace(STUDY, ranged=("loss",)), finished(ENOUGH).rows)
    assert found.cell("second", "loss") == "0.00 to 0.09"


# ---------------------------------------------------------------------- the tables


def test_the_tables_are_those_that_their_page_describes() -> None:
    text = (ROOT / "examples" / "data" / "README.md").read_text()
    for name in TABLES:
        x, y = table(name)
        assert x.isfinite().all()
        told = re.search(rf"`{name}.csv.gz` \| (\d+) \| (\d+) \| (\d+) \|", text)
        assert told
        assert [int(n) for n in told.groups()] == [*x.shape, len(y.unique())]
    assert sum((ROOT / "examples" / "data" / f"{n}.csv.gz").stat().st_size for n in TABLES) < 150e3


def test_no_loss_is_below_the_least() -> None:
    parts = Parts("wine", 0)
    best, model = least(parts), Regression(parts)
    assert 0 < best < model.loss(parts.x, parts.y).item() == pytest.approx(math.log(3))
    assert len(parts.x) + len(parts.held_out[0]) == 178
    for seed in range(3):
        torch.manual_seed(seed)
        for p in model.parameters():
            torch.nn.init.normal_(p)
        assert model.above(best) > 1e-3


# ---------------------------------------------------------------------- pictures


def test_ticks_are_round_and_inside() -> None:
    for (low, high), log in product([(0.0, 1.0), (0.013, 7.2), (3.0, 9500.0)], (False, True)):
        ticks = Scale(low or 1e-3 * log, high, log, 0, 100).ticks()
        assert 2 <= len(ticks) <= 7
        assert all(low <= tick * 1.001 and tick <= high * 1.001 for tick, _ in ticks)


def test_what_is_not_finite_is_drawn_at_the_edge() -> None:
    drawn = Panel("", "x", "y", {"a": [(1, [1.0]), (2, [math.inf]), (3, [math.nan])]}).draw(["a"])
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_names_its_axes_and_has_a_colour_for_each_line_in_both_themes(name: str) -> None:
    drawn = of(name).picture(results(name))
    for kind in {*re.findall(r'class="(s\d)"', drawn)}:
        assert f"--{kind}: #" in drawings.LIGHT
        assert f"--{kind}: #" in drawings.DARK
        assert f".drawing .{kind} {{" in drawings.STYLE
        assert f'<span class="{kind}">' in drawn.partition("<figcaption>")[2]
    for panel in drawn.split("<svg")[1:]:
        height = float(re.findall(r'viewBox="0 0 \S+ (\S+)"', panel)[0])
        assert f'y="{height - 6:g}" text-anchor="middle">' in panel
        assert "rotate(-90" in panel


# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize("name", NAMES)
def test_what_is_published_is_complete_and_on_the_page(name: str) -> None:
    found = results(name)
    assert not found.missing(found.seeds)
    assert found.seeds >= 3
    assert f"\n<!-- published: {name} -->\n" in PAGE
    assert f"<!-- seeds: {name} -->" in PAGE


def test_a_run_of_the_page_comes_out_the_same_again() -> None:
    rows = {row.key: row for row in results("smoothness").rows}
    key = next(key for key in rows if key[:2] == ("2", "clipped") and key[3] == 0)
    threads = torch.get_num_threads()
    assert one("smoothness", *key).values == rows[key].values
    torch.set_num_threads(threads)
