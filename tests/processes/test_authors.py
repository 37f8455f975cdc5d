"""Rules of a user's own over several processes: `authors.py` runs on each of them."""

from tests.processes.launch import on_ranks


def test_sharded_parameters_begin_and_move_as_those_of_one_process_do() -> None:
    out = on_ranks(2, "-m", "tests.processes.authors", "fsdp", "tp", limit=120)
    assert out == ["fsdp: 0 wrong\ntp: 0 wrong\n"] * 2
