"""Run benchmarks, store the tables that they print, and write RESULTS.md.

    python -m benchmarks.printed                  # writes RESULTS.md
    python -m benchmarks.printed --list           # every table, its command and what it needs
    python -m benchmarks.printed small norms      # measures these tables, then writes RESULTS.md
    python -m benchmarks.printed all              # measures each table that needs nothing else

A table is stored in `results/printed/NAME.txt` as its command printed it, with the lines of
`benchmarks/circumstances.py` at its end. In `results/page.md`, `{NAME}` is the place of the table,
and `{ratio: NAME; RACE}` is the place of one ratio. The rest of that page is written by hand.
Afterwards `python scripts/refresh.py` writes the numbers of README.md that come from these tables.
The machine should do nothing else while tables are measured.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.circumstances import MARK, Watch

HERE = Path(__file__).parent
PRINTED = HERE / "results" / "printed"
PLACE = re.compile(r"^\{(\w+)\}$", re.MULTILINE)
RATIO = re.compile(r"\{ratio: (\w+); ([^}]+)\}")


@dataclass(frozen=True)
class Table:
    """A table of RESULTS.md.

    Args:
        command: The module that prints it, and its arguments.
        needs: What must be installed or present beforehand.
        counts: Whether it has counts or losses only, which no load changes.
    """

    command: str
    needs: str = ""
    counts: bool = False


STEP = "benchmarks.step --device cpu --no-compiled --shapes vit resnet50"
BASES = "benchmarks.studies.bases ../checkouts"
INTEL = "an Intel processor, because the ratios differ from the ratios on AMD"
TABLES = {
    "eager": Table(f"{STEP} --measure time"),
    "allocations": Table(f"{STEP} --measure memory", counts=True),
    "compile_time": Table("benchmarks.step --device cpu --measure compile"),
    "small": Table("benchmarks.small"),
    "repeated": Table("benchmarks.studies.repeated"),
    "averages": Table("benchmarks.studies.averages"),
    "ppo": Table("benchmarks.studies.ppo", needs="stable-baselines3"),
    "sharded": Table("benchmarks.sharded --rounds 9 --ranks 1 2 --only blocks thousand vit"),
    "muon": Table(
        "benchmarks.studies.muon time --set equal --rounds 15",
        needs="pytorch_optimizer and heavyball",
    ),
    "muon_gpt2": Table(
        "benchmarks.studies.muon time --set gpt2 --rounds 3",
        needs="pytorch_optimizer and heavyball",
    ),
    "muon_batches": Table("benchmarks.studies.muon batches --set equal --rounds 15"),
    "matrices": Table("benchmarks.studies.matrices --table", counts=True),
    "bases": Table(
        f"{BASES} --only soap klsoap shampoo --layers 2 --rounds 3",
        needs="the authors' repositories in ../checkouts",
    ),
    "bases_kron": Table(
        f"{BASES} --only kron --layers 1 --rounds 4",
        needs="the authors' repositories in ../checkouts",
    ),
    "memory": Table("benchmarks.memory", needs="torchao, heavyball and torch-optimi"),
    "formats": Table("benchmarks.memory --formats"),
    "recover": Table("benchmarks.studies.recover"),
    "guards": Table("benchmarks.studies.added guards"),
    "state_dtype": Table("benchmarks.studies.state_dtype --time"),
    "state_dtype_intel": Table("benchmarks.studies.state_dtype --time", needs=INTEL),
    "state_dtype_regression": Table(
        "benchmarks.studies.state_dtype --task regression", needs="torchao", counts=True
    ),
    "rounding": Table("benchmarks.studies.rounding --time"),
    "rounding_intel": Table("benchmarks.studies.rounding --time", needs=INTEL),
    "rounding_loss": Table("benchmarks.studies.rounding", counts=True),
    "norms": Table("benchmarks.norms"),
    "norms_again": Table("benchmarks.norms"),  # its ratios differ between processes
    "norm_accuracy": Table("benchmarks.studies.norm_accuracy", counts=True),
    "same_as_torch": Table("benchmarks.studies.same_as_torch", counts=True),
    "import_time": Table("benchmarks.import_time"),
    "launches": Table("benchmarks.studies.launches", needs="triton", counts=True),
}
ALL = "all"


def page() -> str:
    """Return the text of RESULTS.md."""
    text = (HERE / "results" / "page.md").read_text()
    text = RATIO.sub(lambda found: f"{ratios(found[1], [found[2]])[0]:.2f}", text)
    return PLACE.sub(lambda found: table(found[1]), text)


def table(name: str) -> str:
    """Return what was printed, with its circumstances below it."""
    lines = (PRINTED / f"{name}.txt").read_text().splitlines()
    notes = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    body = "\n".join(line for line in lines if not line.startswith(MARK)).strip("\n")
    text = f"```text\n{body}\n```\n\n*{', '.join(notes)}*"
    return text if complete(name, notes) else f"{text}\n\n{to_be_rerun(name)}"


def complete(name: str, notes: Sequence[str]) -> bool:
    """Return whether a table says what it depends on."""
    told = ", ".join(notes)
    loaded = TABLES[name].counts or "load average" in told
    return loaded and f"`python -m {TABLES[name].command}`" in told


def to_be_rerun(name: str) -> str:
    """Return the sentence about a table that does not say all that it depends on."""
    return (
        "**To be measured again** with its spread and the load of the machine: "
        f"`python -m benchmarks.printed {name}`, which runs `python -m {TABLES[name].command}`."
    )


def markdown(name: str) -> list[str]:
    """Return the lines of a table that a benchmark printed as Markdown."""
    text = (PRINTED / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if line.startswith("|")]


def cell(name: str, row: str, column: str) -> str:
    """Return a cell of a table that a benchmark printed as Markdown."""
    lines = markdown(name)
    header, _, *body = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    cells = {line[0]: dict(zip(header, line, strict=True)) for line in body}
    return cells[row][column]


def ratios(name: str, races: Sequence[str] = ()) -> list[float]:
    """Return our times over those of torch's fastest spellings, as a table has them.

    Args:
        name: The table.
        races: What is compared, as its lines end: "MLP, clip + Adam, compiled". All lines if there
            is none.
    """
    text = (PRINTED / f"{name}.txt").read_text()
    found = []
    for race in [re.escape(race) for race in races] or [r"[^:;\n]+"]:
        line = (
            r"^(?:met|NOT MET|no bar|busy) +(\d+\.\d\d)(?: \([^)]*\))? +(?:≤ \S+ +)?"
            rf"(?:of torch[^:]*: )?{race}(?:; .*)?$"
        )
        matches = re.findall(line, text, re.MULTILINE)
        if not matches or (races and len(matches) > 1):
            raise ValueError(f"the table {name} has {len(matches)} lines of {race}")
        found += [float(ratio) for ratio in matches]
    return found


def verdicts(name: str) -> tuple[int, int]:
    """Return how many lines of a table meet their bar, and how many do not."""
    text = (PRINTED / f"{name}.txt").read_text()
    met = re.findall(r"^met ", text, re.MULTILINE)
    missed = re.findall(r"^NOT MET ", text, re.MULTILINE)
    return len(met), len(missed)


def keep(name: str, measured: Table) -> None:
    """Run a benchmark, show what it prints and store it."""
    command = shlex.split(measured.command)
    watch = Watch(["python", "-m", *command], counts=measured.counts)
    lines = []
    started = [sys.executable, "-m", *command]
    with subprocess.Popen(started, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    if run.returncode:
        raise SystemExit(run.returncode)
    if not any(line.startswith(MARK) for line in lines):
        lines += [f"{line}\n" for line in watch.lines()]
    (PRINTED / f"{name}.txt").write_text("".join(lines))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.printed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a table to measure, or all")
    parser.add_argument("--list", action="store_true", help="print the tables and their commands")
    args = parser.parse_args(given)
    if args.list:
        for name, one in TABLES.items():
            needs = f"  # needs {one.needs}" if one.needs else ""
            print(f"{name:<24}python -m {one.command}{needs}")
        return
    unknown = [name for name in args.names if name not in (*TABLES, ALL)]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}: choose from {', '.join([*TABLES, ALL])}")
    names = list(args.names)
    if ALL in names:
        names = [name for name, one in TABLES.items() if not one.needs]
    for name in names:
        print(f"\n{name}:", flush=True)
        keep(name, TABLES[name])
    (HERE / "RESULTS.md").write_text(page())


if __name__ == "__main__":
    main()
