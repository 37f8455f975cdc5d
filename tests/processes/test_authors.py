"""Rules of a user's own over several processes: `authors.py` runs on each of them."""

import pytest

from tests.processes.launch import on_ranks

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("setting", "compile"),
    [("fsdp", True), *[pytest.param(*x, marks=slow) for x in (("fsdp", False), ("tp", True))]],
)
def test_sharded_parameters_begin_and_move_as_those_of_one_process_do(setting, compile):
    command = "-m", "tests.processes.authors", setting
    out = on_ranks(2, *command, limit=120, compile=compile)
    assert out == [f"{setting}: 0 wrong\n"] * 2
