"""Watch on sharded models: `watched.py` runs on each of two processes."""

from __future__ import annotations

from tests.processes.launch import on_ranks


def test_two_processes_measure_what_float64_says_of_the_whole_model() -> None:
    said = "fsdp: 0 wrong\ntp: 0 wrong\n"
    assert on_ranks(2, "-m", "tests.processes.watched", "fsdp", "tp", limit=120) == [said] * 2
