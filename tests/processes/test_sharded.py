"""Several processes give what one gives: `sharded.py` runs on each of them."""

import pytest

from tests.processes.launch import on_ranks

slow = pytest.mark.slow


compiled = pytest.mark.parametrize("compile", [False, pytest.param(True, marks=slow)])


def ranks(n, *settings, script="sharded", limit=120, compile=False):
    """Run a script of this folder on n processes; returns what each printed."""
    limit *= max(len(settings), 1)
    command = "-m", f"tests.processes.{script}", *settings
    return on_ranks(n, *command, limit=limit, compile=compile)


def agreed(settings):
    return "".join(f"{setting}: 0 wrong\n" for setting in settings)


@compiled
@pytest.mark.parametrize(
    ("length", "settings"),
    [
        ("brief", ("fsdp", "again")),
        *[
            pytest.param(None, x, marks=slow)
            for x in (("fsdp", "again"), ("ddp",), ("tp", "stages", "flat"))
        ],
    ],
)
def test_two_processes_give_what_one_gives(length, settings, compile):
    """For one construction of every rule, and for each scope of a norm."""
    for out in ranks(2, *([length] if length else []), *settings, compile=compile):
        assert out == agreed(settings)


@slow
@compiled
@pytest.mark.parametrize("setting", ["ddp", "fsdp", "partly", "tp"])
def test_every_construction_gives_on_two_processes_what_it_gives_on_one(setting, compile):
    for out in ranks(2, "every", setting, compile=compile, limit=240):
        assert out == agreed([setting])


@slow
@compiled
@pytest.mark.parametrize("setting", ["fsdp", "hsdp", "both"])
def test_four_processes_give_what_one_gives(setting, compile):
    for out in ranks(4, setting, limit=300, compile=compile):
        assert out == agreed([setting])


@slow
@compiled
def test_logits_that_explode_in_a_sharded_model_are_held_as_in_a_whole_one(compile):
    for out in ranks(2, script="explode", limit=200, compile=compile):
        assert out == agreed(["explode"])


DCP = pytest.mark.xdist_group("dcp")  # one worker makes the checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where checkpoints lie that two processes wrote in the middle of a run."""
    made = {}

    def folder(compile):
        if compile not in made:
            made[compile] = str(tmp_path_factory.mktemp("dcp"))
            ranks(2, made[compile], "save", script="dcp", compile=compile)
        return made[compile]

    return folder


@slow
@compiled
def test_every_form_of_a_distributed_state_dict_resumes_to_the_bit(tmp_path, compile):
    for out in ranks(2, str(tmp_path), "memory", script="dcp", compile=compile):
        assert out == agreed(["memory"])


@DCP
@compiled
@pytest.mark.parametrize("n", [1, pytest.param(4, marks=slow)])
def test_a_checkpoint_of_two_processes_goes_on_with_more_or_fewer(saved, n, compile):
    for out in ranks(n, saved(compile), "load", script="dcp", compile=compile):
        assert out == agreed(["load"])
