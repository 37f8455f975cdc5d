"""Watch on sharded models: `watched.py` runs on each of two processes."""

from __future__ import annotations

import pytest

from tests.processes.launch import on_ranks


@pytest.mark.parametrize("length", [["brief"], pytest.param([], marks=pytest.mark.slow)])
def test_two_processes_measure_what_float64_says_of_the_whole_model(length: list[str]) -> None:
    said = "fsdp: 0 wrong\ntp: 0 wrong\n"
    command = "-m", "tests.processes.watched", *length, "fsdp", "tp"
    assert on_ranks(2, *command, limit=120) == [said] * 2
