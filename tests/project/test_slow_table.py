"""The table of slow tests is what the marks say, and a run of them goes on where it was stopped."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import slow
from tests import day
from tests.helpers import at_once

CASES = [f"tests/a.py::test_a[{i}]" for i in range(40)]


@pytest.mark.slow
def test_the_table_is_made_from_the_marks() -> None:
    (written,) = slow.PLACE.findall(slow.PAGE.read_text())
    assert written == slow.table(slow.known()), "python scripts/slow.py table writes it anew"


# ---------------------------------------------------------------------- the cases of a day


def test_a_day_chooses_a_share_of_the_cases_and_another_day_others() -> None:
    days = [day.Choice(f"2026-01-{i + 1:02}", 0.25).of(CASES) for i in range(31)]
    assert {len(some) for some in days} == {10}
    assert days[0] == day.Choice("2026-01-01", 0.25).of(CASES[::-1])
    assert len(set(map(frozenset, days))) == 31
    assert set.union(*days) == set(CASES)  # a month leaves none out


def test_a_long_case_alone_in_its_file_comes_on_some_days() -> None:
    days = [len(day.Choice(f"day {i}", 0.25).of(CASES[:1])) for i in range(400)]
    assert set(days) == {0, 1}
    assert 0.2 < sum(days) / len(days) < 0.3


def item(case: str, marked: bool = True) -> Any:
    return SimpleNamespace(nodeid=case, get_closest_marker=lambda name: marked or None)


def test_a_share_is_of_each_files_slow_cases_and_without_one_all_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [item(case) for case in CASES] + [
        item(f"{case} quick", marked=False) for case in CASES[:3]
    ]
    items += [item("tests/b.py::test_b")]
    monkeypatch.delenv("SLOW_SHARE", raising=False)
    assert day.chosen(items) == (items, [])
    monkeypatch.setenv("SLOW_SHARE", "0.1")
    monkeypatch.setenv("SLOW_DAY", "2026-01-01")
    (kept, rest), wanted = day.chosen(items), day.Choice("2026-01-01", 0.1).of(CASES)
    assert [x.nodeid for x in kept if x in items[:40]] == [x for x in CASES if x in wanted]
    assert len(wanted) == 4
    assert all(x in kept for x in items[40:43])
    assert len(kept) + len(rest) == len(items)


@at_once("given", [("0", "d"), ("1.5", "d"), ("nan", "d"), ("half", "d"), ("0.5", "")])
def test_a_share_that_is_none_is_refused(given: tuple[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_SHARE", given[0])
        patch.setenv("SLOW_DAY", given[1])
        with pytest.raises(ValueError, match="SLOW_SHARE takes a number above 0 and at most 1"):
            day.choice()


# ---------------------------------------------------------------------- a run of an hour


@at_once("minutes", [[1.0, 2.0, 3.0], [30.0, 40.0, 50.0], [0.0, 1.0, 90.0, 400.0], [1.0] * 80])
def test_shares_fill_an_hour_and_the_short_files_run_whole(minutes: list[float]) -> None:
    given = {f"{i}.py": n for i, n in enumerate(minutes)}
    found = slow.shares(given)
    takes = sum(given[file] * share for file, share in found.items())
    assert takes <= min(60, 1.02 * sum(minutes))
    assert sum(minutes) <= slow.HOUR or takes > 0.95 * slow.HOUR
    assert sum(minutes) > slow.HOUR or set(found.values()) == {1.0}
    shortest = [share for file, share in found.items() if given[file] < slow.HOUR / len(given)]
    assert set(shortest) <= {1.0}


def test_what_was_measured_in_part_is_told_of_the_whole() -> None:
    ran = {"a.py": slow.Ran(50, 50, 0, "1234567", "2026-01-01", 3.0)}
    assert slow.whole({"a.py": 200, "b.py": 7}, ran) == {"a.py": 12.0, "b.py": 1.0}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A table of three files, of which one fails, and what is run of them."""
    told = SimpleNamespace(files=[], failing={"b.py"}, commit="aaaaaaa", today="2026-01-01")
    rows = [f"| `{file}` | {n} | 1 |  |  |  |  |  |  | all |" for file, n in FILES.items()]
    head = f"| {' | '.join(slow.HEADS)} |\n{'|---' * 10}|\n"
    (tmp_path / "slow.md").write_text(
        "<!-- slow -->\n" + head + "\n".join(rows) + "\n<!-- /slow -->\n"
    )

    def run_file(file: str, day: str, share: float, workers: int) -> tuple[int, int, int]:
        told.files.append((file, day, share))
        failed = int(file in told.failing)
        return FILES[file], FILES[file] - failed, failed

    monkeypatch.setattr(slow, "PAGE", tmp_path / "slow.md")
    monkeypatch.setattr(slow, "DONE", tmp_path / "done.json")
    monkeypatch.setattr(slow, "run_file", run_file)
    monkeypatch.setattr(slow, "commit", lambda: told.commit)
    monkeypatch.setattr(slow, "write", lambda ran: None)
    monkeypatch.setattr(slow, "today", lambda: told.today)
    return told


FILES = {"a.py": 10, "b.py": 20, "c.py": 3000}


def ran(told: SimpleNamespace, *arguments: str) -> tuple[int, list[str]]:
    """What a call comes to, and the files that it ran."""
    told.files.clear()
    status = slow.main(["run", *arguments])
    return status, [file for file, *_ in told.files]


def test_a_run_goes_on_after_a_failure_and_at_the_same_commit_where_it_was_stopped(
    runs: SimpleNamespace,
) -> None:
    assert ran(runs) == (1, ["a.py", "b.py", "c.py"])
    assert ran(runs) == (1, ["b.py"])
    runs.failing, runs.today = set(), "2026-01-02"
    assert ran(runs) == (0, ["b.py"])
    assert runs.files[0][1] == "2026-01-01"  # the day on which it began
    assert ran(runs) == (0, [])
    assert ran(runs, "a.py") == (0, ["a.py"])
    assert ran(runs, "--again") == (0, [*FILES])
    assert runs.files[0][1] == "2026-01-02"
    assert ran(runs, "--day", "2025-12-31") == (0, [*FILES])
    runs.commit = "bbbbbbb"
    assert ran(runs) == (0, [*FILES])


def test_what_passed_in_part_runs_again_where_the_whole_is_asked_for(
    runs: SimpleNamespace,
) -> None:
    runs.failing.clear()
    slow.note("c.py", slow.Ran(3000, 3000, 0, "0000000", "2025-01-01", 110.0))
    assert ran(runs) == (0, [*FILES])
    assert [share for *_, share in runs.files] == [1.0, 1.0, 0.48]
    slow.note("c.py", slow.Ran(1440, 1440, 0, "0000000", "2025-01-01", 53.0))
    assert ran(runs, "--whole") == (0, ["c.py"])


def test_a_file_that_is_named_runs_whole(runs: SimpleNamespace) -> None:
    slow.note("c.py", slow.Ran(3000, 3000, 0, "0000000", "2025-01-01", 110.0))
    assert ran(runs, "c.py") == (0, ["c.py"])
    assert runs.files == [("c.py", "2026-01-01", 1.0)]


def test_two_runs_at_once_do_not_write_the_table(
    runs: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with (slow.DONE.parent / "done.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            slow.main(["run"])
    assert "another run writes tests/slow.md now" in capsys.readouterr().err
    assert not runs.files
    assert ran(runs) == (1, [*FILES])


def test_a_day_without_a_case_of_a_file_leaves_its_row_and_is_no_failure(
    runs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing.clear()
    ran(runs)
    before = slow.PAGE.read_text()
    monkeypatch.setattr(slow, "run_file", lambda *_: (0, 0, 0))
    assert slow.main(["run", "--again"]) == 0
    assert slow.PAGE.read_text() == before
    assert "c.py: no case ran, of 3,000" in capsys.readouterr().out


def test_each_file_that_is_done_has_its_row(runs: SimpleNamespace) -> None:
    ran(runs)
    rows = slow.PAGE.read_text().splitlines()
    assert rows[4] == "| `b.py` | 20 | 1 | 20 | 19 | 1 | `aaaaaaa` | 2026-01-01 | 0.0 | all |"
    assert slow.known()["c.py"] == slow.Ran(3000, 3000, 0, "aaaaaaa", "2026-01-01", 0.0)


def test_a_file_that_nobody_knows_is_refused(
    runs: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        slow.main(["run", "d.py"])
    assert "no slow cases are in d.py: tests/slow.md has the files" in capsys.readouterr().err
    assert not runs.files
