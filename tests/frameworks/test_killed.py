"""A training that is killed in the middle goes on, in another process, as if it had not been."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.frameworks


def train(name: str, folder: Path, step: int) -> tuple[int, list[str]]:
    """How the process ends, and the digest that it prints."""
    folder.mkdir(exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = ROOT / "tests" / "frameworks" / "killed.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, name, str(step)],
        env={**os.environ, **offline, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("→ ")]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("fastai", 10),
        ("composer", 10),
        ("sentence_transformers", 5),
        ("torchtune", 10),
        ("verl", 25),
        ("nemo_automodel", 25),
    ],
)
def test_a_killed_training_ends_as_one_that_was_not(name: str, step: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: see tests/frameworks/README.md")
    ended, whole = train(name, tmp_path / "whole", 0)
    assert (ended, len(whole)) == (0, 1)
    assert train(name, tmp_path / "killed", step) == (-signal.SIGKILL, [])
    assert train(name, tmp_path / "killed", 0) == (0, whole)
