"""Weights for evaluation of models on several processes: `averaged.py` runs on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.launch import on_ranks


def ranks(n: int, *settings: str, compile: bool = False) -> list[str]:
    """What each of n processes printed."""
    command = "-m", "tests.processes.averaged", *settings
    return on_ranks(n, *command, limit=120, compile=compile)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "setting", ["fsdp", *[pytest.param(x, marks=pytest.mark.slow) for x in ("tp", "behind")]]
)
def test_two_processes_average_as_one_does(setting: str, compile: bool) -> None:
    assert ranks(2, setting, compile=compile) == [f"{setting}: 0 wrong\n"] * 2


@pytest.mark.slow
def test_a_distributed_state_dict_of_an_evaluation_goes_on_as_training_would_have() -> None:
    assert ranks(2, "evaluation") == ["evaluation: 0 wrong\n"] * 2


@pytest.mark.slow
def test_both_kinds_of_weights_are_in_a_checkpoint_of_any_number_of_processes(
    tmp_path: Path,
) -> None:
    ranks(2, str(tmp_path), "save")
    for n in (1, 2):
        assert ranks(n, str(tmp_path), "load") == ["load: 0 wrong\n"] * n
