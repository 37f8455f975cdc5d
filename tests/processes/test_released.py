"""A model that FSDP2 shards releases its gradients: `released.py` runs on two processes."""

import pytest

from tests.processes.launch import on_ranks


@pytest.mark.parametrize(
    "checks", [("eager", "summed", "loaded"), pytest.param(("compiled",), marks=pytest.mark.slow)]
)
def test_a_sharded_model_releases_its_gradients_with_the_same_bits_as_without(checks):
    """One gradient at a time, eager and compiled, summed over batches, and from a checkpoint."""
    for out in on_ranks(2, "-m", "tests.processes.released", *checks, limit=120):
        assert out == "".join(f"{check}: 0 wrong\n" for check in checks)
