"""Where the seconds of the quick tests go: by file and by cause.

    python scripts/profile_tests.py                    # all quick tests, with an empty kernel cache
    python scripts/profile_tests.py tests/core         # some of them
    python scripts/profile_tests.py --json seconds.json

The tests run under this file as a pytest plugin. It measures four causes: building kernels with the
C++ compiler, `torch.compile`, waiting for other processes, and reading a test file (collecting).
What is left of a test is its own arithmetic. Seconds are those of all workers together.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing.process
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "PROFILE_TESTS"
CAUSES = ("kernels", "torch.compile", "processes", "collecting", "own code")
COMMAND = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q")


class Clock:
    """Seconds by (test file, cause). A cause inside another cause counts for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.tests: dict[str, float] = {}
        self.kernels: list[str] = []
        self.file = ""
        self.busy = False

    @contextmanager
    def cause(self, name: str) -> Iterator[None]:
        """Count the seconds of a block for a cause."""
        if self.busy:
            yield
            return
        self.busy, start = True, time.perf_counter()
        try:
            yield
        finally:
            self.seconds[self.file, name] += time.perf_counter() - start
            self.busy = False

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, with its seconds counted for a cause."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.cause(name):
                return function(*args, **kwargs)

        return call


CLOCK = Clock()


# ---------------------------------------------------------------------- inside the workers


def pytest_configure() -> None:
    """Wrap the functions that each cause passes through."""
    from torchzero_clip.engines.compiled.printers import build

    build_kernel = CLOCK.counted("kernels", build._build)

    def build_and_note(text: str, command: list[str], path: Path) -> Path:
        CLOCK.kernels.append(path.name)
        return build_kernel(text, command, path)

    build._build = build_and_note
    subprocess.Popen.wait = CLOCK.counted("processes", subprocess.Popen.wait)  # type: ignore[method-assign]
    subprocess.Popen.communicate = CLOCK.counted("processes", subprocess.Popen.communicate)  # type: ignore[method-assign]
    process = multiprocessing.process.BaseProcess
    for name in ("start", "join"):
        setattr(process, name, CLOCK.counted("processes", getattr(process, name)))


def pytest_collection_finish() -> None:
    """Wrap `torch.compile`'s compiler, which is imported by the first test file that needs it."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    if module is not None:
        name = "_compile"
        setattr(module, name, CLOCK.counted("torch.compile", getattr(module, name)))


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Note which file is read."""
    CLOCK.file = module_path.relative_to(ROOT).as_posix()


def pytest_make_collect_report(collector: Any) -> Any:
    """Start the clock of a collector; `pytest_collectreport` stops it."""
    collector.began = time.perf_counter()


def pytest_collectreport(report: Any) -> None:
    """Count the seconds that a file took to be read."""
    file = report.nodeid.partition("::")[0]
    if file.endswith(".py") and getattr(report, "result", None):
        began = getattr(report.result[0].parent, "began", None)
        if began is not None:
            CLOCK.seconds[file, "collecting"] += time.perf_counter() - began


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note which file runs."""
    CLOCK.file = nodeid.partition("::")[0]


def pytest_runtest_logreport(report: Any) -> None:
    """Count the seconds of a test, with its fixtures."""
    CLOCK.tests[report.nodeid] = CLOCK.tests.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: Any) -> None:
    """Write what this process measured. The process that only hands tests out measured nothing."""
    if FOLDER not in os.environ or getattr(session.config.option, "dist", "no") != "no":
        return
    rows = [[file, cause, s] for (file, cause), s in CLOCK.seconds.items()]
    path = Path(os.environ[FOLDER], f"{os.getpid()}.json")
    path.write_text(json.dumps({"causes": rows, "tests": CLOCK.tests, "kernels": CLOCK.kernels}))


# ---------------------------------------------------------------------- the tables


class Measured:
    """What all processes measured together."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.tests: dict[str, float] = {}
        self.kernels: list[str] = []
        for path in folder.glob("*.json"):
            page = json.loads(path.read_text())
            self.tests |= page["tests"]
            self.kernels += page["kernels"]
            for file, cause, seconds in page["causes"]:
                self.files[file][cause] += seconds
        for test, seconds in self.tests.items():
            self.files[test.partition("::")[0]]["own code"] += seconds
        for causes in self.files.values():
            inside = sum(causes[name] for name in ("kernels", "torch.compile", "processes"))
            causes["own code"] = max(0.0, causes["own code"] - inside)

    def folders(self) -> dict[str, dict[str, float]]:
        """Return the seconds by cause of each folder."""
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for file, causes in self.files.items():
            for cause, seconds in causes.items():
                sums[file.rpartition("/")[0]][cause] += seconds
        return sums


def table(rows: dict[str, dict[str, float]], head: str, most: int) -> Iterator[str]:
    """Yield the lines of a Markdown table, the largest rows first."""
    yield f"| {head} | seconds | {' | '.join(CAUSES)} |"
    yield "|---|" + "---:|" * (1 + len(CAUSES))
    largest = sorted(rows.items(), key=lambda row: -sum(row[1].values()))
    total = {cause: sum(causes.get(cause, 0.0) for causes in rows.values()) for cause in CAUSES}
    for name, causes in [*largest[:most], ("all", total)]:
        seconds = [causes.get(cause, 0.0) for cause in CAUSES]
        yield f"| {name} | {sum(seconds):.0f} | {' | '.join(f'{s:.0f}' for s in seconds)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="folders or files of tests")
    parser.add_argument("--json", type=Path, help="write the seconds of each test to this file")
    parser.add_argument("--files", type=int, default=25, help="how many files the table shows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        known = {**os.environ, FOLDER: folder, "TORCHZERO_CLIP_CACHE": cache}
        known["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-p", "scripts.profile_tests", *COMMAND]
        start = time.perf_counter()
        done = subprocess.run([*command, *given.paths], cwd=ROOT, env=known, check=False)
        wall = time.perf_counter() - start
        found = Measured(Path(folder))
    folders = found.folders()
    print("\n".join(table(folders, "folder", len(folders))))
    print()
    print("\n".join(table(found.files, "file", given.files)))
    print(f"\n{len(found.tests):,} tests, {wall:.0f} s in all")
    print(f"{len(found.kernels)} kernels were built, {len(set(found.kernels))} different ones")
    if given.json:
        given.json.write_text(json.dumps(found.tests, indent=0, sort_keys=True))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
