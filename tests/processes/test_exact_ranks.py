"""Exact weights and stochastic draws are the same on any number of ranks."""

from pathlib import Path

import pytest

from tests.processes.launch import on_ranks


def ranks(n: int, folder: Path, *what: str) -> None:
    for out in on_ranks(n, "-m", "tests.processes.exact", str(folder), *what, limit=200):
        assert out == "".join([f"{name}: 0 wrong\n" for name in what])


def test_a_sharded_run_is_float32_and_goes_on_with_more_ranks(tmp_path: Path) -> None:
    ranks(2, tmp_path, "twins", "save", "draws", "whole")
    ranks(3, tmp_path, "load")


@pytest.mark.slow
def test_of_one_and_three_ranks_and_with_fewer_afterwards(tmp_path: Path) -> None:
    ranks(3, tmp_path, "twins", "save", "draws", "whole")
    for n in (1, 2):
        ranks(n, tmp_path, "load", "twins", "draws")
