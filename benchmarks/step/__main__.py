"""The command: python -m benchmarks.step."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import benchmarks.step as package
from benchmarks.circumstances import watched
from benchmarks.step import bars, report
from benchmarks.step.chains import COMPILED, COMPILES, OURS, RACES
from benchmarks.step.compile_time import COUNTS, cold_and_warm
from benchmarks.step.memory import as_large_as_parameters, kept_bytes
from benchmarks.step.shapes import ON_CPU, ON_CUDA, SHAPES
from benchmarks.step.timing import BARE, Result, bare, copy_bandwidth, run

MODULE = "benchmarks.step"
SECONDS = 4.5
"""For one comparison: the 44 of two models on CPU then take less than six minutes."""
RESULTS = Path(__file__).parents[1] / "results"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    head, _, text = (package.__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m benchmarks.step",
        description=head,
        epilog=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="which models")
    parser.add_argument("--chains", nargs="+", choices=RACES, default=list(RACES))
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="for each comparison, after its first three rounds",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU where there is one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where CSV and picture go")
    parser.add_argument("--quick", action="store_true", help="a smoke run: small, and no compiling")
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=["time", "memory", "compile"],
        default=["time", "memory"],
        help="the time of steps, their memory, or the time to compile",
    )
    parser.add_argument("--no-compiled", action="store_true", help="leave out our compiled step")
    args = parser.parse_args(given)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.all_shapes = args.shapes is None
    args.shapes = args.shapes or (ON_CUDA if args.device == "cuda" else ON_CPU)
    if args.quick:
        args.shapes, args.seconds = ["quick"], 0.0
    args.skip = [COMPILED] if args.quick or args.no_compiled else []
    return args


def race(chain: str, shapes: str, loose: bool, args: argparse.Namespace) -> Result:
    """One comparison, with its floor."""
    sizes, contest = SHAPES[shapes](), RACES[chain]
    contestants = {**contest.contestants, BARE: bare}
    everyone = replace(contest, contestants=contestants)
    times, missing = run(everyone, sizes, loose, args.seconds, args.device, args.skip)
    entries = sum(torch.Size(s).numel() for s in sizes)
    scaled_in_place = loose and contest.kind in ("helper", "grad")  # nothing is written then
    words = 1 if scaled_in_place else contest.words
    gradients = "within the limit" if loose else "clipped"
    copy = 4 * entries * words / args.copy if args.copy else 0.0
    share = words * 4 / (7 * contest.dtype.itemsize)
    return Result(args.device, shapes, chain, gradients, times, share, copy, missing)


def races(args: argparse.Namespace) -> list[Result]:
    """Run all comparisons; each one is shown on the standard error when it is done."""
    results: list[Result] = []
    for shapes in args.shapes:
        for chain in args.chains:
            for loose in (False, True) if RACES[chain].loose else (False,):
                results.append(race(chain, shapes, loose, args))
                show(report.table(results[-1]))
    return results


def memory_of(chains: Sequence[str]) -> list[bars.Bar]:
    """Return the bars about the memory of a step of each chain."""
    steps = {name: RACES[name] for name in chains if RACES[name].kind != "helper"}
    counts = {
        name: as_large_as_parameters(r.contestants[OURS], r.dtype) for name, r in steps.items()
    }
    kept = {
        (name, loose): kept_bytes(r.contestants[OURS], loose, r.dtype)
        for name, r in steps.items()
        for loose in ((False, True) if r.loose else (False,))
    }
    return [*bars.of_memory(counts), *bars.of_kept(kept)]


def compiling() -> list[bars.Bar]:
    """Print how long compiling takes, and return its bars."""
    times = {count: cold_and_warm(count) for count in COUNTS}
    for count, (cold, warm) in times.items():
        print(f"compiling {count} tensors: {cold:.1f} s, with a cache {warm:.1f} s", flush=True)
    return list(bars.of_compiling(times))


def show(text: str) -> None:
    """Print what is no part of a table that is stored."""
    print(text, file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    about = report.environment(args.device)
    show("\n".join(f"{key}: {value}" for key, value in about.items()))
    args.copy = copy_bandwidth(args.device) if args.device == "cuda" else 0.0
    if args.copy:
        show(f"copy bandwidth: {args.copy / 1e9:.0f} GB/s")
    found: list[bars.Bar] = []
    if "time" in args.measure:
        with watched(MODULE, given) as watch:
            results = races(args)
            found += bars.of_results(results)
            if args.quick:
                print("a smoke run, which decides nothing about time")
            print(bars.judged(found, watch.busy or args.quick))
        path = args.out / f"step_{args.device}.csv"
        report.write_csv(path, about | watch.facts(), results)
        show(f"written: {path}")
        if report.picture(path.with_suffix(".png"), results):
            show(f"drawn: {path.with_suffix('.png')}")
    if "memory" in args.measure:
        with watched(MODULE, given, counts=True):
            counted = memory_of(args.chains)
            print(bars.judged(counted, busy=False))
            found += counted
    if "compile" in args.measure and COMPILES:
        with watched(MODULE, given) as watch:
            compiled = compiling()
            print(bars.judged(compiled, watch.busy))
            found += compiled
    if args.all_shapes:
        show(bars.judged(bars.unmeasured(found, COMPILES), busy=False))


if __name__ == "__main__":
    main()
