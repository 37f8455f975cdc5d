"""The command: see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks.guide
from benchmarks.guide.report import table
from benchmarks.guide.runs import Row, work
from benchmarks.rows import read

ROOT = Path(__file__).parents[2]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(benchmarks.guide.__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="when to stop")
    add("--table", action="store_true", help="run nothing, print the comparisons so far")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "guide.csv")
    options = parser.parse_args(given)
    if options.table:
        print(table(read(options.out, Row)))
    else:
        text = ROOT / "examples" / "data" / "harbour.txt"
        print(f"{work(options.out, text, options.minutes)} runs in {options.out}")


if __name__ == "__main__":
    main()
