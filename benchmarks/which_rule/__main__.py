"""The command: see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import benchmarks.which_rule
from benchmarks.which_rule.report import picture, tables
from benchmarks.which_rule.runs import (
    CALM,
    OPTIMIZERS,
    RULES,
    Case,
    Row,
    read,
    record,
    runs,
    sweep,
    write,
)
from benchmarks.which_rule.troubles import SIZES, TROUBLES

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEXT = ROOT / "examples" / "data" / "harbour.txt"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(benchmarks.which_rule.__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, help="the folder that results are written to, or read from")
    add("--table", action="store_true", help="run nothing, print the tables of the results")
    add("--pictures", type=Path, help="run nothing, draw the results into this folder")
    add("--sweep", action="store_true", help="run what the learning rates were chosen from")
    add("--troubles", nargs="+", choices=TROUBLES, default=list(TROUBLES), metavar="TROUBLE")
    add("--rules", nargs="+", choices=[CALM, *RULES], default=[CALM, *RULES], metavar="RULE")
    add("--seeds", type=int, default=5, help="how many")
    add("--steps", type=int, help="of every run, instead of the size's own")
    add("--size", choices=SIZES, default="small", help="of the models; large is for a GPU")
    add("--text", type=Path, default=TEXT, help="what the language models learn")
    add("--device", default="cpu")
    options = parser.parse_args(given)
    reading = options.table or options.pictures
    if options.out is None and not reading:
        parser.error("--out: give a folder for the results")
    options.out = options.out or RESULTS
    for name in ("out", "pictures"):
        folder = getattr(options, name)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name}: there is no folder {folder}")
    if reading and not (options.out / "which_rule.csv").exists():
        parser.error(
            f"--out: there is no which_rule.csv in {options.out}; run without --table first"
        )
    for name in ("seeds", "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if not options.text.is_file():
        parser.error(f"--text: there is no file {options.text}")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: {options.device!r}: {str(error).splitlines()[0]}")
    return options


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    if options.table:
        for name, table in tables(options.out).items():
            print(f"{name}\n\n{table}\n")
    if options.pictures:
        rows = read(options.out / "which_rule.csv", Row)
        for trouble in {row.trouble: None for row in rows}:
            file = options.pictures / f"which_rule_{trouble.replace(' ', '_')}.svg"
            file.write_text(picture(rows, trouble))
    if options.table or options.pictures:
        return
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    case = Case(SIZES[options.size], options.text, torch.device(options.device), options.steps)
    if options.sweep:
        write(options.out / "which_rule_rates.csv", sweep(case, options.troubles))
        return
    pairs = [(trouble, optimizer) for trouble in options.troubles for optimizer in OPTIMIZERS]
    norms = write(options.out / "which_rule_norms.csv", (record(case, *pair) for pair in pairs))
    work = runs(case, options.troubles, options.rules, options.seeds, norms)
    write(options.out / "which_rule.csv", work)


if __name__ == "__main__":
    main()
