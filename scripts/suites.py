"""Other people's tests, run unchanged over our chains.

    python scripts/suites.py timm --source pytorch-image-models

An adapter in `tests/peers/suites` says of which commit which files are run, and puts our chains
where the suite looks for its own optimizers. What fails must have a reason in the adapter, and a
reason must have a case that fails; then the suite's row in `benchmarks/results/suites.csv` is
written anew. Of a suite that takes long a quick part is run, and no row written, but with `--all`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "tests" / "peers"
sys.path[:1] = [str(ROOT), str(PEERS)]  # in place of this folder, where `suites` is this file

from benchmarks import rows  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "suites.csv"
ADAPTERS = sorted(
    file.stem for file in (PEERS / "suites").glob("*.py") if "\nCOMMIT = " in file.read_text()
)


@dataclass(frozen=True)
class Case:
    """What became of one test: "passed", "failed" or "skipped", and what was said about it."""

    name: str
    outcome: str
    words: str


@dataclass(frozen=True)
class Row:
    """A suite at its pinned commit; of each reason, how many cases have it."""

    suite: str
    what: str
    source: str
    commit: str
    torch: str
    cases: int
    passed: int
    failed: int
    skipped: int
    why_failed: str
    why_skipped: str


def blob(file: Path) -> str:
    """The name that git has for the content of a file."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def check(suite: Any, source: Path) -> None:
    """Raise a sentence unless the files are those of the pinned commit."""
    for name, expected in suite.FILES.items():
        file = source / name
        if not file.exists():
            raise SystemExit(f"{source} has no {name}: give a checkout of {suite.SOURCE}")
        if not expected:  # what nobody has read yet is at least of that commit
            asked = ["git", "-C", str(source), "rev-parse", f"{suite.COMMIT}:{name}"]
            expected = subprocess.run(
                asked, check=False, capture_output=True, text=True
            ).stdout.strip()
        if not expected or not blob(file).startswith(expected):
            raise SystemExit(f"{name} is not the text of {suite.SOURCE} at {suite.COMMIT}")


def run(name: str, suite: Any, source: Path, file: str, in_part: bool = False) -> list[Case]:
    """The cases of one file, in two processes of its own, or as its adapter says."""
    paths = [*(str(source / path) for path in suite.PATHS), str(PEERS), str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-c", os.devnull, "--rootdir", str(source), "--tb", "short"]
        options += ["-k", getattr(suite, "CHOICE", ""), "-n", str(getattr(suite, "PROCESSES", 2))]
        options += ["-p", "suites.plugin", "-p", "no:cacheprovider", "--junitxml", str(report)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(source / file)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONDONTWRITEBYTECODE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "SUITE": name,
                "SUITE_SOURCE": str(source),
                "SUITE_PART": "quick" if in_part else "",
                **suite.SETTINGS,
            },
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        if os.environ.get("SUITE_VERBOSE"):
            print(done.stdout)
        return list(cases(report))


def cases(report: Path) -> Iterator[Case]:
    """The cases of a report; one that fails in several ways, as subtests do, is one."""
    found: dict[str, Case] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome, words = "passed", ""
        for part in case:
            if part.tag in ("failure", "error"):
                outcome, words = "failed", f"{part.get('message')}\n{part.text}"
            elif part.tag == "skipped" and outcome == "passed":
                outcome, words = "skipped", str(part.get("message"))
        if name not in found or outcome == "failed":
            found[name] = Case(name, outcome, words)
    yield from found.values()


def reasons(suite: Any, failed: Iterable[Case]) -> tuple[Counter[str], list[str], list[str]]:
    """How many cases fail for each reason; which have none; and which reasons have no case."""
    counts: Counter[str] = Counter()
    wrong, used = [], set()
    for case in failed:
        found = [pattern for pattern in suite.DIFFERS if re.search(pattern, case.name)]
        if not found:
            wrong.append(f"{case.name} fails, and the adapter has no reason: {case.words[:1500]}")
        for pattern in found[:1]:
            used.add(pattern)
            counts[suite.DIFFERS[pattern]] += 1
    return counts, wrong, [pattern for pattern in suite.DIFFERS if pattern not in used]


def told(counts: Counter[str]) -> str:
    return "; ".join(f"{count} × {why}" for why, count in counts.most_common())


def judge(name: str, suite: Any, found: list[Case], in_part: bool = False) -> Row:
    """The row of a suite, if all that fails has a reason."""
    import torch

    failed = [case for case in found if case.outcome == "failed"]
    skipped = [case for case in found if case.outcome == "skipped"]
    counts, wrong, unused = reasons(suite, failed)
    if not in_part:
        wrong += [f"no case fails because of {pattern!r} any more" for pattern in unused]
    if not any(case.outcome == "passed" for case in found):
        wrong.append(f"{name}: no case passes")
    if wrong:
        raise SystemExit("\n".join(wrong))
    return Row(
        suite=name,
        what=(suite.__doc__ or "").partition("\n")[0].rstrip("."),
        source=suite.SOURCE,
        commit=suite.COMMIT,
        torch=torch.__version__.partition("+")[0],
        cases=len(found),
        passed=len(found) - len(failed) - len(skipped),
        failed=len(failed),
        skipped=len(skipped),
        why_failed=told(counts),
        why_skipped=told(Counter(" ".join(case.words.split()) for case in skipped)),
    )


def table(results: list[Row]) -> str:
    """The rows for a page of the documentation."""
    lines = ["| suite | text of | torch | cases | pass | differ | not run |", "|" + "---|" * 7]
    for row in results:
        at = f"https://github.com/{row.source}/tree/{row.commit}"
        counts = f"{row.cases} | {row.passed} | {row.failed} | {row.skipped}"
        lines.append(f"| {row.what} | [{row.commit[:7]}]({at}) | {row.torch} | {counts} |")
    return "\n".join(lines)


def causes(results: list[Row]) -> str:
    """Return a table of the reasons why cases differ or are not run, each with its count."""
    lines = ["| suite | result | cases | reason |", "|---|---|--:|---|"]
    for row in results:
        for words, why in (("differ", row.why_failed), ("not run", row.why_skipped)):
            for part in filter(None, re.split(r"; (?=\d+ × )", why)):
                count, _, reason = part.partition(" × ")
                lines.append(f"| {row.what} | {words} | {count} | {reason.rstrip('.')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=ADAPTERS)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of the suite")
    parser.add_argument("--all", action="store_true", help="all of a suite that has a quick part")
    given = parser.parse_args()
    source = given.source.resolve()
    suite = importlib.import_module(f"suites.{given.name}")
    check(suite, source)
    in_part = hasattr(suite, "quick") and not given.all
    files = getattr(suite, "RUNS", suite.FILES)  # where the text has no tests of its own
    found = [case for file in files for case in run(given.name, suite, source, file, in_part)]
    row = judge(given.name, suite, found, in_part)
    if not in_part:
        others = [other for other in rows.read(RESULTS, Row) if other.suite != row.suite]
        rows.write(RESULTS, Row, sorted([*others, row], key=lambda row: row.suite))
    counts = f"{row.passed} pass, {row.failed} differ, {row.skipped} not run"
    more = "; --all runs all, and writes the row" if in_part else ""
    print(f"{row.suite}: {row.cases} cases, {counts}{more}")


if __name__ == "__main__":
    main()
