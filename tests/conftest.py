"""What every test has: one thread, a fixed seed, reproducible hypothesis runs."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import helpers

torch.set_num_threads(1)  # xdist brings the parallelism
gc.disable()  # until tests are collected: nothing of them is garbage

settings.register_profile("suite", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=300, derandomize=True)
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """Tens of thousands of tests need not be walked whenever garbage is collected."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what each folder takes, in seconds of all workers; a minute or more in all."""
    took: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            file = getattr(report, "nodeid", "").partition("::")[
                0
            ]  # a value behind it may have slashes
            folder = file.rpartition("/")[0]
            took[folder] += getattr(report, "duration", 0.0)
    if sum(took.values()) >= 60:
        each = [
            f"{folder} {seconds:.0f} s" for folder, seconds in took.most_common() if seconds >= 1
        ]
        terminalreporter.write_line(f"of {sum(took.values()):.0f} s: {', '.join(each)}")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What the files before have left, as all that torch.compile keeps, is not walked either."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    helpers.seed()


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    reason = "the pictures of Recorder.plot need matplotlib"
    module, saved = pytest.importorskip("matplotlib.figure", reason=reason), []
    original = module.Figure.savefig

    def savefig(self: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(module.Figure, "savefig", savefig)
    return saved
