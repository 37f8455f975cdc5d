"""What every test has: one thread, a fixed seed, reproducible hypothesis runs."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import day, helpers
from torchzero_clip.core.description import Description

torch.set_num_threads(1)  # xdist brings the parallelism
gc.disable()  # until tests are collected: nothing of them is garbage

COUNTS = pytest.StashKey[list[int]]()

settings.register_profile("suite", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=300, derandomize=True)
settings.load_profile("suite")


def pytest_report_header() -> list[str]:
    """What chooses the slow cases of this run, so that they can be run again."""
    chooses = day.choice()
    return [] if chooses is None else [f"slow cases of a day: {chooses} chooses them again"]


@pytest.hookimpl(trylast=True)  # when -m has chosen
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave the slow cases of other days out, and tell the process that counts how many."""
    items[:], rest = day.chosen(items)
    if rest:
        config.hook.pytest_deselected(items=rest)
    counts = [len(items), len(items) + len(rest)]
    getattr(config, "workeroutput", {})["counts"] = counts
    config.stash[COUNTS] = counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a worker, which are those of each."""
    node.config.stash[COUNTS] = node.workeroutput.get("counts")


def pytest_collection_finish() -> None:
    """Tens of thousands of tests need not be walked whenever garbage is collected."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many slow cases ran, and what each folder takes, in seconds of all workers; a minute
    or more in all."""
    counts, chooses = terminalreporter.config.stash.get(COUNTS, None), day.choice()
    if counts and chooses:
        terminalreporter.write_line(f"{counts[0]:,} of {counts[1]:,} cases ran: {chooses}")
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


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Let the names in configs lead to the same classes after a test.

    A class that a test defines replaces other classes of its name in the registry, such as classes
    of other test files.
    """
    known = dict(Description.registry)
    yield
    Description.registry.update(known)


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
