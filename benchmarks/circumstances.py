"""What a table of a benchmark depends on: its command, commit, versions, CPU, threads and load.

A benchmark runs inside `watched`, which prints three lines after the table:

    # `python -m benchmarks.small --seconds 8`
    # 2026-11-28, commit 1234567, torch 2.13.0+cpu, Python 3.11.7, AMD EPYC, 2 cores, 1 thread
    # load average 0.05 before and 1.02 after; other processes took 0.4 % of the CPU time

If other processes took more than 5 % of the CPU time, the last line calls the machine busy, and
nothing is decided from the table.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
STAT = Path("/proc/stat")
CPUINFO = Path("/proc/cpuinfo")
MARK = "# "
"""Begins each line about circumstances."""
BUSY = 0.05
"""The share of CPU time of other processes above which nothing is decided from a table."""
WORKING = (0, 1, 2, 5, 6, 7)
"""The fields of a CPU in /proc/stat that are work: user, nice, system, irq, softirq, steal."""
CHANGED = ["git", "status", "--porcelain", "--untracked-files=no", "--", "*.py"]


class Watch:
    """The circumstances of one table, from its construction on.

    Args:
        command: What prints the table.
        counts: Whether the table has counts only, which no load changes.
    """

    def __init__(self, command: Sequence[str], *, counts: bool = False) -> None:
        self.command = command
        self.counts = counts
        self.load_before = load_average()
        self.begin = time.monotonic()
        self.work_before = work_of_cores()
        self.own_before = work_of_this_process()

    @property
    def foreign(self) -> float | None:
        """The share of CPU time that other processes took so far; None if it is not known."""
        work = work_of_cores()
        if work is None or self.work_before is None:
            return None
        own = work_of_this_process() - self.own_before
        available = cores() * (time.monotonic() - self.begin)
        return min(1.0, max(0.0, (work - self.work_before - own) / available))

    @property
    def busy(self) -> bool:
        """Whether other processes took so much CPU time that times decide nothing."""
        share = self.foreign
        return not self.counts and share is not None and share > BUSY

    def lines(self) -> list[str]:
        """Return the lines to print after the table."""
        found = [f"`{shlex.join(self.command)}`", versions()]
        if not self.counts:
            found.append(self.load())
        return [MARK + line for line in found]

    def facts(self) -> dict[str, str]:
        """Return the command and the load, by name."""
        return {"command": shlex.join(self.command), "load": self.load(), "commit": commit()}

    def load(self) -> str:
        """Return the load of the machine, in words."""
        averages = f"load average {self.load_before} before and {load_average()} after"
        share = self.foreign
        if share is None:
            return f"{averages}; the CPU time of other processes is not known"
        others = f"other processes took {100 * share:.1f} % of the CPU time"
        verdict = ": busy, so nothing is decided from this table" if self.busy else ""
        return f"{averages}; {others}{verdict}"


@contextmanager
def watched(
    module: str, given: Sequence[str] | None = None, *, counts: bool = False
) -> Iterator[Watch]:
    """Print the circumstances of a table after it.

    Args:
        module: The benchmark.
        given: Its arguments; None for those of this process.
        counts: Whether the table has counts only.
    """
    arguments = sys.argv[1:] if given is None else given
    watch = Watch(["python", "-m", module, *arguments], counts=counts)
    yield watch
    print(*watch.lines(), sep="\n", flush=True)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work_of_cores() -> float | None:
    """Return the seconds that the cores of this process have worked; None if it is not known."""
    if not STAT.exists():
        return None
    total = 0
    for core, fields in re.findall(r"^cpu(\d+) (.*)$", STAT.read_text(), re.MULTILINE):
        if int(core) in os.sched_getaffinity(0):
            ticks = [int(field) for field in fields.split()]
            total += sum(ticks[i] for i in WORKING)
    return total / os.sysconf("SC_CLK_TCK") if total else None


def work_of_this_process() -> float:
    """Return the CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def load_average() -> str:
    """Return the load average of the last minute."""
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"


def versions() -> str:
    """Return the date, commit, versions, CPU and threads of a measurement."""
    threads = torch.get_num_threads()
    return ", ".join(
        [
            datetime.date.today().isoformat(),
            f"commit {commit()}",
            f"torch {torch.__version__}",
            f"Python {platform.python_version()}",
            processor(),
            f"{cores()} cores",
            f"{threads} thread{'s' if threads > 1 else ''}",
        ]
    )


def commit() -> str:
    """Return the commit of this tree, and whether its Python files have changed since."""
    head = git("git", "rev-parse", "--short=7", "HEAD")
    if not head:
        return "none"
    return f"{head} with uncommitted changes" if git(*CHANGED) else head


def git(*command: str) -> str:
    """Return what git prints; nothing if this is not a checkout."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Return the name of the CPU, if the system tells it."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
