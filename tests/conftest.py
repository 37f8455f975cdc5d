"""What every test has: one thread, a fixed seed, reproducible hypothesis runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # xdist brings the parallelism

settings.register_profile("suite", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
