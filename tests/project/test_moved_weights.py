"""The picture of weights that never move: a slice of its file comes again."""

from __future__ import annotations

import pytest

from benchmarks.rows import read
from benchmarks.studies.moved_weights import FILE, KINDS, RATES, RUNS, SEEDS, Row, one, picture


def test_weights_of_norms_stay_where_float32_moves_them() -> None:
    found = {name: {x.kind: x.share for x in one(name, 1e-4, 0, steps=3)} for name in RUNS}
    assert found["float32"]["weights of norms"] > 0.9
    assert found["bfloat16, nearest"]["weights of norms"] == 0.0
    assert found["float32"]["matrices"] > 2 * found["bfloat16, nearest"]["matrices"] > 0.0


def test_the_picture_has_a_line_of_each_rounding_for_each_kind() -> None:
    assert picture().count("<polyline") == len(RUNS) * len(KINDS)


def test_the_file_has_every_run() -> None:
    rows = read(FILE, Row)
    assert len(rows) == len(RUNS) * len(RATES) * len(SEEDS) * len(KINDS)


@pytest.mark.slow
def test_a_run_of_the_file_comes_again() -> None:
    rows = read(FILE, Row)
    for name in RUNS:
        for row in one(name, 3e-4, 3):
            (kept,) = [x for x in rows if (x.rounding, x.rate, x.seed, x.kind) == key(row)]
            assert row.share == pytest.approx(kept.share, abs=0.02)


def key(row: Row) -> tuple[str, float, int, str]:
    return row.rounding, row.rate, row.seed, row.kind
