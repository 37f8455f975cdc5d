"""The study of weights for evaluation: its runs are paired, and its table is of pairs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.guide.runs import GRID, SEEDS, TUNING, Row
from benchmarks.studies.averaged import METHODS, NAME, main, missing, one, table


@pytest.mark.parametrize("method", ["cosine", "Schedule-Free", "constant, EMA 0.9"])
def test_a_run_is_the_same_again(method: str) -> None:
    first = one(method, 1.0, 0, steps=3)
    assert first == one(method, 1.0, 0, steps=3)
    assert first != replace(one(method, 1.0, 1, steps=3), seed=0)


def test_the_average_is_what_is_judged() -> None:
    losses = {one(method, 1.0, 0, steps=12).final_loss for method in METHODS if "cos" not in method}
    assert len(losses) > 3


def test_the_tuning_comes_first_and_the_table_is_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        Row(NAME, method, rate, seed, 1.0 + 0.1 * abs(rate - 1.0) + 0.01 * i)
        for i, method in enumerate(METHODS)
        for rate, seed in product(GRID, TUNING)
    ]
    assert not [wanted for wanted in missing(rows) if wanted[2] in TUNING]
    assert len(list(missing(rows))) == len(METHODS) * len(SEEDS)
    first = [row for row in rows if (row.rate, row.seed) == (1.0, TUNING[0])]
    rows += [replace(row, seed=seed) for row in first for seed in SEEDS]
    assert not list(missing(rows))
    assert table(rows).splitlines()[-1].startswith("| constant, Lookahead | 1 | 20 | 1.0700 | +0.0")
    main(["--table", "--out", str(tmp_path / "none.csv")])
    assert capsys.readouterr().out.startswith("| | rate |")
