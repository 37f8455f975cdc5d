"""The study of what snapshots cost, on small shapes."""

from __future__ import annotations

import re

from benchmarks.studies import recover


def test_it_says_the_means_their_ratio_the_longest_steps_and_the_memory_of_the_ring() -> None:
    lines = recover.measure(recover.QUICK, compile=False, steps=20, every=10)
    assert [line.split()[0] for line in lines] == ["without", "with", "ratio", "the"]
    assert all([re.search(r"longest +\d+\.\d\d", line) for line in lines[:2]])
    assert re.search(r", 24\.0 bytes a parameter, in 2 snapshots", lines[3])
