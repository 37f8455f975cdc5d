"""What lies behind the marker `slow`, as the table of CONTRIBUTING.md: python scripts/slow.py.

It collects the tests twice, with the marker and without, and writes the table anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PLACE = re.compile(r"(?<=<!-- slow -->\n).*?(?=<!-- /slow -->)", re.DOTALL)


def collected(*args: str) -> Counter[tuple[str, str]]:
    """How many cases each test has, by file and name."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *args]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    cases = [line.partition("[")[0] for line in said.splitlines() if "::" in line]
    return Counter([(case.partition("::")[0], case.rpartition("::")[2]) for case in cases])


def table() -> str:
    """A row for each file with slow tests."""
    slow, quick = collected("-m", "slow"), collected()
    lines = [
        "| | cases behind `slow` | among the quick | behind `slow` as a whole |",
        "|---|---|---|---|",
    ]
    for file in sorted({file for file, _ in slow}):
        both = [sum(n for (where, _), n in some.items() if where == file) for some in (slow, quick)]
        names = [name for where, name in slow if where == file and (where, name) not in quick]
        whole = "; ".join([name.removeprefix("test_").replace("_", " ") for name in names])
        lines.append(f"| `{file.removeprefix('tests/')}` | {both[0]:,} | {both[1]:,} | {whole} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text()))
