"""RESULTS.md: a text with the tables that instruments printed.

    python -m benchmarks.printed small -- benchmarks.small --seconds 5  # runs it, keeps the table
    python -m benchmarks.printed                                        # writes RESULTS.md anew

What was printed lies in `results/printed/NAME.txt` under a line that says when, of which commit and
where; `{NAME}` in `results/page.md` is its place. The rest of that page is written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent
PRINTED = HERE / "results" / "printed"
PLACE = re.compile(r"^\{(\w+)\}$", re.MULTILINE)


def page() -> str:
    """The text of RESULTS.md."""
    return PLACE.sub(lambda found: table(found[1]), (HERE / "results" / "page.md").read_text())


def table(name: str) -> str:
    """What was printed, and under which circumstances."""
    head, _, body = (PRINTED / f"{name}.txt").read_text().partition("\n")
    return f"```text\n{body.rstrip()}\n```\n\n*{head.removeprefix('# ')}*"


def keep(name: str, module: str, args: Sequence[str]) -> None:
    """Run an instrument, show what it prints and keep it."""
    command = [sys.executable, "-m", module, *args]
    lines = [f"# {circumstances(['python', *command[1:]])}\n"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            sys.stdout.write(line)
            lines.append(line)
    if run.returncode:
        raise SystemExit(run.returncode)
    (PRINTED / f"{name}.txt").write_text("".join(lines))


def circumstances(command: Sequence[str]) -> str:
    """A command, when it was run, of which commit and where."""
    ask = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(ask, check=False, capture_output=True, text=True, cwd=HERE)
    today = datetime.date.today().isoformat()
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {processor()}"
    return f"`{' '.join(command)}`, {today}, commit {commit.stdout.strip() or 'none'}, {where}"


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.printed", description=__doc__)
    parser.add_argument("name", nargs="?", help="of the table; without one, RESULTS.md is written")
    parser.add_argument("command", nargs="*", help="after --: the module, and its arguments")
    args = parser.parse_args(given)
    if args.name is None:
        (HERE / "RESULTS.md").write_text(page())
    elif args.command:
        keep(args.name, args.command[0], args.command[1:])
    else:
        parser.error("say what prints the table: NAME -- MODULE [ARGUMENTS]")


if __name__ == "__main__":
    main()
