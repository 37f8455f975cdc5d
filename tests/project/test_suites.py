"""The script for other people's tests counts what happened, and asks a reason of each failure."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from benchmarks import rows
from scripts import suites

THEIRS = """
import pytest, unittest, heavyball, torch
from heavyball.core import build

@pytest.mark.parametrize("name", ["sgd", "unscaled_adamw"])
def test_a_step(name):
    w = torch.nn.Parameter(torch.ones(2))
    opt = build([w], getattr(heavyball, name), lr=0.5, weight_decay=0.0)
    w.grad.fill_(1.0)
    opt.step()
    assert w.tolist() == [0.5, 0.5] and type(opt).__name__ == "Modular"

def test_that_fails():
    raise ValueError("so it is")

@unittest.skip("theirs")
def test_that_they_skip():
    raise ValueError
"""


def suite(**more):
    held = {"SOURCE": "a/b", "COMMIT": "c", "FILES": {}, "PATHS": [], "SETTINGS": {}, "DIFFERS": {}}
    return SimpleNamespace(**held | {"__doc__": "Tests of a.\n"} | more)


@pytest.mark.slow
def test_an_adapter_puts_chains_where_a_suite_looks_for_its_optimizers(tmp_path):
    file = tmp_path / "test_theirs.py"
    file.write_text(THEIRS)
    pinned = suite(
        FILES={file.name: suites.blob(file)},
        PROCESSES=0,
        DIFFERS={"that_fails": "it is otherwise"},
    )
    suites.check(pinned, tmp_path)
    found = suites.run("heavyball", pinned, tmp_path, file.name)
    row = suites.judge("a", pinned, found)
    assert (row.cases, row.passed, row.failed, row.skipped) == (4, 1, 1, 2)
    assert row.why_failed == "1 × it is otherwise"
    why = {"1 × this library does not have the method", "1 × theirs"}
    assert set(row.why_skipped.split("; ")) == why


def test_a_failure_without_a_reason_and_a_reason_without_a_failure_write_no_row():
    found = [suites.Case("x::test_one", "passed", ""), suites.Case("x::test_two", "failed", "oh")]
    with pytest.raises(SystemExit, match="x::test_two fails, and the adapter has no reason: oh"):
        suites.judge("a", suite(), found)
    with pytest.raises(SystemExit, match="no case fails because of 'three' any more"):
        suites.judge("a", suite(DIFFERS={"two": "a reason", "three": "another"}), found)
    part = suites.judge("a", suite(DIFFERS={"two": "why", "three": "another"}), found, in_part=True)
    assert part.why_failed == "1 × why"
    with pytest.raises(SystemExit, match="a: no case passes"):
        suites.judge("a", suite(DIFFERS={"two": "a reason"}), found[1:])


def test_another_text_than_that_of_the_commit_is_refused(tmp_path):
    (tmp_path / "t.py").write_text("pass")
    with pytest.raises(SystemExit, match=r"t.py is not the text of a/b at c"):
        suites.check(suite(FILES={"t.py": "0123"}), tmp_path)
    with pytest.raises(SystemExit, match=r"t.py is not the text of a/b at c"):
        suites.check(suite(FILES={"t.py": ""}), tmp_path)
    with pytest.raises(SystemExit, match=r"has no u.py: give a checkout of a/b"):
        suites.check(suite(FILES={"u.py": ""}), tmp_path)


def test_the_quick_part_of_optax_is_the_second_of_its_four_functions(monkeypatch):
    monkeypatch.syspath_prepend(str(suites.PEERS))
    monkeypatch.delitem(sys.modules, "suites", raising=False)
    quick = importlib.import_module("suites.optax").quick
    picked = [k for k in range(12) if quick(f"ContribTest::test_optimizers{k}")]
    assert picked == [1, 5, 9]


def test_a_row_says_of_each_case_what_became_of_it_and_of_its_adapter_what_it_is(monkeypatch):
    monkeypatch.syspath_prepend(str(suites.PEERS))
    monkeypatch.delitem(sys.modules, "suites", raising=False)
    for row in rows.read(suites.RESULTS, suites.Row):
        adapter = importlib.import_module(f"suites.{row.suite}")
        assert row.suite in suites.ADAPTERS
        assert (row.source, row.commit) == (adapter.SOURCE, adapter.COMMIT)
        assert row.cases == row.passed + row.failed + row.skipped
        for told, count in ((row.why_failed, row.failed), (row.why_skipped, row.skipped)):
            counts = [int(part.split(" × ")[0]) for part in told.split("; ") if " × " in part]
            assert sum(counts) == count
        parts = {part.split(" × ", 1)[-1] for part in row.why_failed.split("; ") if part}
        assert parts <= {part for why in adapter.DIFFERS.values() for part in why.split("; ")}
