"""One chain over several parts of a rank takes one norm over all parts of all stages."""

from tests.processes.launch import on_ranks


def test_an_interleaved_pipeline_and_shards_of_groups_step_as_one_process() -> None:
    settings = "all", "apart", "shards", "lacking"
    for out in on_ranks(2, "-m", "tests.processes.interleaved", *settings, limit=120):
        assert out == "".join([f"{name}: 0 wrong\n" for name in settings])
