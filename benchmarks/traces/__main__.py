"""The command: see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import benchmarks.traces
from benchmarks.rows import write
from benchmarks.traces.judge import Line, judge
from benchmarks.traces.policy import table
from benchmarks.traces.policy import write as write_policy
from benchmarks.traces.runs import STEPS, TRAININGS, record
from benchmarks.traces.troubles import troubles
from torchzero_clip import Trace

RESULTS = Path(__file__).parents[1] / "results"
POLICY = RESULTS / "policy.jsonl"  # what guards and Recover would have done
TRACES = RESULTS / "traces"
TROUBLES = RESULTS / "troubles"  # the lab shows both, and an installation has them


def load(name: str) -> Trace:
    """A recorded trace, by the name of its training."""
    return Trace.read(TRACES / f"{name}.csv.gz")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(benchmarks.traces.__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    what = "train, write the norms of the atlas' gradients, or look at what was recorded"
    add("what", choices=["record", "troubles", "judge", "policy"], help=what)
    add("--runs", nargs="+", choices=TRAININGS, default=list(TRAININGS), metavar="RUN")
    add("--steps", type=int, default=STEPS, help="of every training")
    add("--out", type=Path, help="the folder for traces, or the file for what came of judging")
    options = parser.parse_args(given)
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    if options.what == "record":
        folder = options.out or TRACES
        folder.mkdir(exist_ok=True)
        for name in options.runs:
            trace = record(TRAININGS[name], options.steps)
            trace.write(folder / f"{name}.csv.gz", TRAININGS[name].digits)
            print(f"{name}: {trace}", flush=True)
    elif options.what == "troubles":
        folder = options.out or TROUBLES
        folder.mkdir(exist_ok=True)
        for name, trace in troubles():
            trace.write(folder / f"{name}.csv.gz", digits=5)
    elif options.what == "policy":
        path = options.out or POLICY
        write_policy({name: load(name) for name in TRAININGS}, path)
        print(table(path))
    else:
        lines = []
        for name in options.runs:
            lines += judge(name, load(name))
            print(f"{name}: {len(load(name))} steps", flush=True)
        write(options.out or RESULTS / "simulate.csv", Line, lines)


if __name__ == "__main__":
    main()
