"""Rules of a user's own over several processes: `authors.py` runs on each of them."""

import pytest

from tests.processes.launch import on_ranks


@pytest.mark.parametrize("compile", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sharded_parameters_begin_and_move_as_those_of_one_process_do(compile):
    command = "-m", "tests.processes.authors", "fsdp", "tp"
    out = on_ranks(2, *command, limit=120, compile=compile)
    assert out == ["fsdp: 0 wrong\ntp: 0 wrong\n"] * 2
