"""Runs on several processes go back together: `recovered.py` runs on each of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import some
from tests.processes.launch import on_ranks, python


@pytest.mark.parametrize(
    ("n", "way"), some([(2, "replayed"), (2, "eager"), (3, "eager"), (3, "replayed")], one_in=4)
)
def test_ranks_go_back_alike_where_one_of_them_has_bad_batches_and_on_bit_for_bit(
    n: int, way: str
) -> None:
    told = on_ranks(n, "-m", "tests.processes.recovered", way, limit=120)
    assert told == [f"{way}: 0 wrong\n"] * n


@pytest.mark.parametrize(
    ("n", "way"), some([(2, "eager"), (2, "replayed"), (3, "eager")], one_in=3)
)
def test_a_loss_on_one_rank_alone_and_a_run_that_is_resumed(n: int, way: str) -> None:
    what = f"untold-{way}", f"resumed-{way}"
    told = on_ranks(n, "-m", "tests.processes.recovered", *what, limit=120)
    assert told == ["".join([f"{one}: 0 wrong\n" for one in what])] * n


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 200])
def test_a_run_that_goes_back_is_killed_at_random_moments_and_ends_as_one_that_was_not(
    kills: int, tmp_path: Path
) -> None:
    done = python(
        "-m", "tests.processes.recovered_kills", tmp_path, kills, 0, limit=60 + 10 * kills
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    assert found["backs"] > 0
    assert found["equal"]
    if kills >= 100:  # where few kills strike is chance
        assert found["lives that went back"] > 0
