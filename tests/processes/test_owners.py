"""Sharded matrices have owners: `owners.py` runs on several processes."""

import pytest

from tests.processes.launch import on_ranks

CHECKPOINT = pytest.mark.xdist_group("owners")  # one worker makes the checkpoint


def ranks(n, *checks, compile=False):
    """Run checks on n processes; each prints that nothing was wrong."""
    for out in on_ranks(n, "-m", "tests.processes.owners", *checks, limit=120, compile=compile):
        assert out == "".join(f"{check}: 0 wrong\n" for check in checks if check != "brief")


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("n", "checks"),
    [
        (2, ("brief", "loads", "balance", "beside", "told", "equal")),
        pytest.param(2, ("balance", "equal"), marks=pytest.mark.slow),
        pytest.param(4, ("balance", "equal", "gathered"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_does_its_share_with_two_collectives_a_shape_and_all_comes_out_as_on_one(
    n, checks, compile
):
    ranks(n, *checks, compile=compile)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where four processes have left a checkpoint in the middle of a run."""
    made = tmp_path_factory.mktemp("owners")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINT_FOLDER", str(made))
        ranks(4, "save")
    return str(made)


@pytest.mark.slow
@CHECKPOINT
@pytest.mark.parametrize("n", [4, 2, 1])
def test_a_checkpoint_of_four_is_loaded_bit_for_bit_by_fewer(folder, n, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_FOLDER", folder)
    ranks(n, "load")
