"""The study of weights for evaluation: its runs are paired, and its tables are of pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.guide.runs import GRID, SEEDS, TUNING, Row
from benchmarks.studies.averaged import (
    METHODS,
    TASKS,
    compared,
    main,
    missing,
    one,
    results,
    table,
    tables,
)

TASK = "labels with heavy tails"


@pytest.mark.parametrize("method", ["cosine", "Schedule-Free", "constant, EMA 0.9"])
def test_a_run_is_the_same_again(method: str) -> None:
    first = one(TASK, method, 1.0, 0, steps=3)
    assert first == one(TASK, method, 1.0, 0, steps=3)
    assert first != replace(one(TASK, method, 1.0, 1, steps=3), seed=0)


def test_the_average_is_what_is_judged() -> None:
    methods = [method for method in METHODS if "cos" not in method]
    assert len({one(TASK, method, 1.0, 0, steps=12).final_loss for method in methods}) > 3


def test_a_run_that_blows_up_counts_as_infinite() -> None:
    assert one(TASK, "constant", 1e9, 0, steps=40).final_loss == math.inf


def test_the_tuning_comes_first_and_the_tables_are_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Row(task, method, rate, seed, 1.0 + 0.1 * abs(rate - 1.0) + 0.01 * i)
        for task, (i, method) in product(TASKS, enumerate(METHODS))
        for rate, seed in product(GRID, TUNING)
    ]
    assert {(rate, seed) for *_, rate, seed in missing(rows)} == {*product([1.0], SEEDS)}
    assert len(list(missing(rows))) == len(TASKS) * len(METHODS) * len(SEEDS)
    first = [row for row in rows if (row.rate, row.seed) == (1.0, TUNING[0])]
    rows += [replace(row, seed=seed) for row in first for seed in SEEDS]
    assert not list(missing(rows))
    assert {x.pairs for x in compared(rows).values()} == {len(SEEDS)}
    last = table(rows, TASK).splitlines()[-1]
    assert last.startswith("| constant, Lookahead | 1 | 1.07 | 0.07 worse (0.07 to 0.07; p = ")
    main(["--table", "--out", str(tmp_path / "none.csv")])
    assert capsys.readouterr().out.count("| rate |") == len(TASKS)


@pytest.mark.slow
def test_what_is_published_is_complete_and_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    rows, page = results(), (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    assert not list(missing(rows))
    assert {x.pairs for x in compared(rows).values()} == {len(SEEDS)}
    main(["--table"])
    printed, made = capsys.readouterr().out, tables(rows)
    for name in made.keys() - {"count"}:
        assert f"<!-- averages: {name} -->" in page
        assert made[name] in printed


def test_what_the_page_says_of_averages_holds() -> None:
    made = compared(results())
    emas = "constant, EMA 0.9", "constant, EMA 0.99"
    for task in TASKS:
        assert made[task, "Schedule-Free", "cosine"].verdict == "better"
        assert {made[task, method, "constant"].verdict for method in emas} == {"better"}
        assert "better" not in {made[task, method, "cosine"].verdict for method in emas}
        assert made[task, "cosine, EMA 0.9", "cosine"].verdict != "better"
    halves = [made[task, "constant, mean of the second half", "constant"] for task in TASKS]
    assert all(
        half.shift > made[task, emas[0], "constant"].shift
        for task, half in zip(TASKS, halves, strict=True)
        if "language" in task
    )
