"""Optimizers that were created before `fully_shard`: `replaced.py` runs on two processes."""

from __future__ import annotations

from tests.processes.launch import on_ranks
from tests.processes.replaced import CASES

WARNS = {"groups", "parameters", "compiled", "attached"}


def test_only_an_optimizer_with_replaced_parameters_warns() -> None:
    expected = {name: "warns" if name in WARNS else "silent" for name in CASES}
    lines = "".join([f"{name}: {word}\n" for name, word in expected.items()])
    assert on_ranks(2, "-m", "tests.processes.replaced", limit=120) == [lines] * 2
