"""Rules of all parameters are the same over stages: `stages.py` runs on each of two."""

from __future__ import annotations

from tests.processes.launch import on_ranks
from tests.processes.stages import CHAINS, ENGINES


def test_stages_of_a_pipeline_move_as_the_whole_model() -> None:
    for out in on_ranks(2, "-m", "tests.processes.stages", *ENGINES, limit=300):
        assert out.splitlines() == [f"{engine}: {chain}" for engine in ENGINES for chain in CHAINS]
