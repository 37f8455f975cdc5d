"""Rules of all parameters are the same over stages: `stages.py` runs on each of two."""

from __future__ import annotations

import pytest

from tests.processes.launch import on_ranks
from tests.processes.stages import CHAINS, ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_stages_of_a_pipeline_move_as_the_whole_model(engine: str) -> None:
    for out in on_ranks(2, "-m", "tests.processes.stages", engine, limit=300):
        assert out.splitlines() == [f"{engine}: {chain}" for chain in CHAINS]
