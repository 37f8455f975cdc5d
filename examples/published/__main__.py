"""The command: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rows import write
from examples.published.study import ENOUGH, FILES, NAMES, ROOT, Results, Row, one, results

OWN = ROOT / "published"  # where runs go that are not for the page


def work(name: str, folder: Path, seeds: int, pool: ProcessPoolExecutor) -> Results:
    """Add runs to the file of a study until none is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    while wanted := (found := results(name, folder)).missing(seeds):
        jobs = [pool.submit(one, name, *run) for run in wanted]
        made = (job.result() for job in as_completed(jobs))
        write(folder / f"{name}.csv", Row, shown(made, name, len(jobs)), more=True)
    return found


def shown(made: Iterator[Row], name: str, many: int) -> Iterator[Row]:
    """Yield the rows as runs end, and print a line of progress."""
    begin, live = time.monotonic(), sys.stdout.isatty()
    for count, row in enumerate(made, start=1):
        yield row
        if live or count == many:
            left = (time.monotonic() - begin) * (many - count) / count
            bar = "█" * (20 * count // many) + "░" * (20 - 20 * count // many)
            clock = "{}:{:02}".format(*divmod(int(left), 60))
            line = f"{name:14} {bar} run {count} of {many}, {clock} left, {row.case}, {row.method}"
            print(f"\r\x1b[2K{line[:110]}" if live else line, end="" if live else "\n", flush=True)
    print("\n" * live, end="")


def agreement(found: Results, name: str) -> str:
    """Return how many runs have the same results as the committed runs."""
    kept = {row.key: row.values for row in results(name).rows}
    both = [row for row in found.rows if row.key in kept]
    same = sum(row.values == kept[row.key] for row in both)
    return f"{same} of the {len(both)} runs that are committed too have the same figures"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m examples.published")
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--only", nargs="*", choices=NAMES, default=NAMES)
    add("--workers", type=int, default=2, help="processes, of one thread each")
    add("--out", type=Path, help=f"a folder; of {ENOUGH} seeds and more that of the committed ones")
    add("--table", action="store_true", help="run nothing, say what the files do")
    options = parser.parse_args(given)
    folder = options.out or (FILES if options.table or options.seeds >= ENOUGH else OWN)
    if options.table:
        for name in options.only:
            print(f"{name}\n\n{results(name, folder).table()}\n")
        return
    if options.seeds >= ENOUGH:
        print(f"{options.seeds} seeds take half an hour on two cores; if stopped, call it again.")
    print(f"Runs go into {folder}; delete a file, or lines of it, to run them again.")
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for name in options.only:
            found = work(name, folder, options.seeds, pool)
            print(f"\n{found.table()}\n\n{agreement(found, name)}\n", flush=True)


if __name__ == "__main__":
    main()
