"""The command: see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import benchmarks.guide
from benchmarks.guide.report import FILE, results, tables
from benchmarks.guide.runs import work


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(benchmarks.guide.__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="when to stop")
    add("--table", action="store_true", help="run nothing, print what the file says")
    add("--out", type=Path, default=FILE, help="the file that runs are added to")
    options = parser.parse_args(given)
    if options.table:
        for name, text in tables(results(options.out)).items():
            print(f"{name}\n\n{text}\n")
    else:
        print(f"{work(options.out, options.minutes)} runs in {options.out}")


if __name__ == "__main__":
    main()
