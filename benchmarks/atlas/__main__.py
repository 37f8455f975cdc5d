"""The command: see the package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import benchmarks.atlas
from benchmarks.atlas.rules import CASES, PLACES, RULES
from benchmarks.atlas.runs import Curve, Row, run
from benchmarks.rows import read, write

RESULTS = Path(__file__).parents[1] / "results"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(benchmarks.atlas.__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE")
    add("--places", nargs="+", choices=PLACES, default=list(PLACES), metavar="PLACE")
    add("--workers", type=int, default=2, help="how many processes")
    add("--out", type=Path, default=RESULTS, help="the folder of atlas.csv and atlas_curves.csv")
    add("--print", action="store_true", help="write no files, print the lines")
    options = parser.parse_args(given)
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if not options.out.is_dir():
        parser.error(f"--out: there is no folder {options.out}")
    cases = [case for case in CASES if case[0] in options.rules and case[1] in options.places]
    rows: list[Row] = []
    curves: list[Curve] = []
    for (rule, place), (found, drawn) in zip(cases, run(cases, options.workers), strict=True):
        rows += found
        curves += drawn
        for row in found if options.print else []:
            print(*vars(row).values(), sep="\t")
        if not options.print:
            print(f"{rule}, {place}", flush=True)
    if not options.print:
        merge(options.out / "atlas.csv", rows)
        merge(options.out / "atlas_curves.csv", curves)


def merge(file: Path, made: Sequence[Row | Curve]) -> None:
    """Write what was made in the place of what the file has of these cases; it keeps the rest."""
    found = {case: [row for row in made if (row.rule, row.place) == case] for case in CASES}
    again = {(row.rule, row.place) for row in made}
    for row in read(file, type(made[0])):
        if (row.rule, row.place) not in again:
            found.setdefault((row.rule, row.place), []).append(row)
    write(file, type(made[0]), [row for case in CASES for row in found[case]])


if __name__ == "__main__":
    main()
