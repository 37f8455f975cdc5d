"""Run the tests marked `slow`, file by file, and write the table of their last results.

    python scripts/slow.py run             # what has not passed at this commit yet
    python scripts/slow.py run --again     # all of it
    python scripts/slow.py run core/test_norms.py
    python scripts/slow.py table           # write the table anew from the marks

A run continues after a failure. If a run is stopped, the next call at the same commit resumes it:
`.slow.json` lists the files that passed. All files together take an hour. Short files run all their
cases. Long files run a share of their cases, and the date selects this share (`tests/day.py`). A
file that is named runs all its cases, and so do all files with `--whole`. `--day` selects the cases
of another date. Each file that has run gets a row in `tests/slow.md`. Only one run at a time may
write this page.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "slow.md"
DONE = ROOT / ".slow.json"
HOUR = 55.0  # minutes that a run may take, apart from what is collected before it
PLACE = re.compile(r"(?<=<!-- slow -->\n).*?(?=<!-- /slow -->)", re.DOTALL)
NONE = 5  # what pytest says where no case is chosen: those of few cases have days without
HEADS = (
    "file",
    "cases",
    "quick cases",
    "ran",
    "passed",
    "failed",
    "commit",
    "day",
    "minutes",
    "tests without a quick case",
)


class Ran(NamedTuple):
    """What came of the slow cases of a file."""

    cases: int
    passed: int
    failed: int
    commit: str
    day: str
    minutes: float

    @classmethod
    def of_row(cls, cells: Sequence[str]) -> Ran | None:
        """What a row of the table says; None where the file has not run."""
        ran, passed, failed, commit, day, minutes = cells[3:9]
        if not commit:
            return None
        counts = [int(n.replace(",", "")) for n in (ran, passed, failed)]
        return cls(*counts, commit.strip("`"), day, float(minutes))

    def cells(self) -> list[str]:
        """Its part of a row."""
        counts = [f"{n:,}" for n in (self.cases, self.passed, self.failed)]
        return [*counts, f"`{self.commit}`", self.day, f"{self.minutes:.1f}"]


# ---------------------------------------------------------------------- the table


def collected(*args: str) -> Counter[tuple[str, str]]:
    """How many cases each test has, by file and name."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *args]
    alone = {key: value for key, value in os.environ.items() if key != "SLOW_SHARE"}
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=alone
    ).stdout
    cases = [line.partition("[")[0] for line in said.splitlines() if "::" in line]
    found = [(case.partition("::")[0], case.rpartition("::")[2]) for case in cases]
    return Counter([(file.removeprefix("tests/"), name) for file, name in found])


def known() -> dict[str, Ran]:
    """What the table says of each file that has run."""
    (body,) = PLACE.findall(PAGE.read_text())
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in body.splitlines()[2:]]
    found = {row[0].strip("`"): Ran.of_row(row) for row in rows}
    return {file: ran for file, ran in found.items() if ran is not None}


def table(ran: Mapping[str, Ran]) -> str:
    """A row for each file with slow tests: what the marks say, and what came of its last run."""
    slow, quick = collected("-m", "slow"), collected()
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for file in sorted({file for file, _ in slow}):
        both = [sum(n for (where, _), n in some.items() if where == file) for some in (slow, quick)]
        names = [name for where, name in slow if where == file and (where, name) not in quick]
        whole = "; ".join([name.removeprefix("test_").replace("_", " ") for name in names])
        last = ran[file].cells() if file in ran else [""] * 6
        cells = [f"`{file}`", *[f"{n:,}" for n in both], *last, whole]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(ran: Mapping[str, Ran]) -> None:
    """Write the table anew."""
    body = table(ran)
    PAGE.write_text(PLACE.sub(lambda _: body, PAGE.read_text()))


# ---------------------------------------------------------------------- the run


def shares(minutes: Mapping[str, float]) -> dict[str, float]:
    """The share of each file's cases that runs in an hour: the short ones whole, and of those that
    take longer what takes as long as each other."""
    left, longest = HOUR, max(minutes.values(), default=0.0)
    in_order = sorted(minutes.values())
    for i, some in enumerate(in_order):
        if some * (len(in_order) - i) > left:
            longest = left / (len(in_order) - i)
            break
        left -= some
    return {
        file: max(0.01, round(min(1.0, longest / max(n, 0.1)), 2)) for file, n in minutes.items()
    }


def whole(cases: Mapping[str, int], ran: Mapping[str, Ran]) -> dict[str, float]:
    """The minutes that each file would take with all its cases; a guess where none has run."""
    return {
        file: ran[file].minutes * n / max(ran[file].cases, 1) if file in ran else 1.0
        for file, n in cases.items()
    }


def commit() -> str:
    """The commit that is checked out, and a mark of what has been changed since."""

    def git(*args: str) -> str:
        command = ["git", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout

    changed = git("diff", "HEAD", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    mark = f"+{hashlib.sha256(changed.encode()).hexdigest()[:4]}" if changed else ""
    return git("rev-parse", "--short=7", "HEAD").strip() + mark


def remembered(here: str, day: str | None, again: bool) -> dict[str, Any]:
    """What passed at this commit, and the day by which its cases are chosen: another one only
    where it is given."""
    if not again and DONE.exists():
        held: dict[str, Any] = json.loads(DONE.read_text())
        if held["commit"] == here and day in (None, held["day"]):
            return held
    return {"commit": here, "day": day or today(), "passed": {}}


def today() -> str:
    """The date."""
    return datetime.date.today().isoformat()


def run_file(file: str, day: str, share: float, workers: int) -> tuple[int, int, int]:
    """Run the slow cases of a file; returns how many ran, passed and failed."""
    chosen = {"SLOW_DAY": day} | ({"SLOW_SHARE": f"{share:g}"} if share < 1 else {})
    every = {key: value for key, value in os.environ.items() if not key.startswith("SLOW_")}
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow", f"tests/{file}"]
        command += ["-n", str(workers), "--dist", "loadgroup", f"--junitxml={found}"]
        done = subprocess.run(command, check=False, cwd=ROOT, env={**every, **chosen})
        for suite in ElementTree.parse(found).iter("testsuite") if found.exists() else ():
            kinds = "tests", "skipped", "failures", "errors"
            counts.update({key: int(suite.get(key, 0)) for key in kinds})
    failed = counts["failures"] + counts["errors"] if counts["tests"] else done.returncode != NONE
    ran = counts["tests"] - counts["skipped"]  # as those that need Triton, where it is not there
    return ran, max(0, ran - failed), int(failed)


def run(options: argparse.Namespace, cases: Mapping[str, int]) -> list[str]:
    """Run what has not passed at this commit; returns the files with failures."""
    here, failures = commit(), list[str]()
    held = remembered(here, options.day, options.again)
    all_cases = options.whole or options.files
    part = dict.fromkeys(cases, 1.0) if all_cases else shares(whole(cases, known()))
    for file in options.files or cases:
        if held["passed"].get(file, 0.0) >= part[file] and not options.files:
            print(f"{file}: passed at {here} already", flush=True)
            continue
        print(f"\n== {file}: {part[file]:.0%} of {cases[file]:,} cases", flush=True)
        began = time.monotonic()
        counts = run_file(file, held["day"], part[file], options.workers)
        took = (time.monotonic() - began) / 60
        if not any(counts):
            print(f"{file}: no case ran, of {cases[file]:,}", flush=True)
        if counts[-1]:
            failures.append(file)
        else:
            held["passed"][file] = part[file]
        DONE.write_text(json.dumps(held, indent=1))
        if any(counts):
            note(file, Ran(*counts, here, held["day"], took))
    return failures


def note(file: str, ran: Ran) -> None:
    """Write what came of a file into its row."""
    lines = PAGE.read_text().splitlines(keepends=True)
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if cells[0] == f"`{file}`":
            lines[i] = f"| {' | '.join([*cells[:3], *ran.cells(), *cells[9:]])} |\n"
    PAGE.write_text("".join(lines))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("files", nargs="*", help="under tests, as the table has them; all without")
    parser.add_argument("--again", action="store_true", help="what has passed too")
    parser.add_argument("--whole", action="store_true", help="all cases of all files")
    parser.add_argument("--day", help="what chooses the cases of files that run in part")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_intermixed_args(None if arguments is None else list(arguments))
    with DONE.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error("another run writes tests/slow.md now: wait until it is done")
        return answer(options, parser)


def answer(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Do what was asked, alone."""
    write(known())
    if options.what == "table":
        return 0
    (body,) = PLACE.findall(PAGE.read_text())
    rows = [line[1:-1].split("|") for line in body.splitlines()[2:]]
    cases = {row[0].strip().strip("`"): int(row[1].replace(",", "")) for row in rows}
    unknown = sorted(set(options.files) - cases.keys())
    if unknown:
        parser.error(f"no slow cases are in {', '.join(unknown)}: tests/slow.md has the files")
    failures = run(options, cases)
    print(f"\nfailed: {', '.join(failures)}" if failures else "\nall that ran passed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
