"""One chain over several parts of a rank takes one norm over all parts of all stages."""

from tests.processes.launch import on_ranks


def test_an_interleaved_pipeline_steps_as_one_process() -> None:
    for out in on_ranks(2, "-m", "tests.processes.interleaved", "all", "apart", limit=120):
        assert out == "all: 0 wrong\napart: 0 wrong\n"
