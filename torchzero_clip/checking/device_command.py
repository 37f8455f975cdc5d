"""The command `python -m torchzero_clip check-device`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from torchzero_clip.checking.device_checks import check_device


def check_device_command(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the text of `check_device`. Then exit with code 1 if a check failed."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip check-device",
        description="Check the numbers, synchronizations, CUDA graphs and speed of this library on "
        "your GPU, and print a table that you can paste into an issue. Exit code 1 if a check "
        "failed, or if no check ran. Without a GPU, the checks run on the CPU.",
    )
    add = parser.add_argument
    add("--device", help="the device, such as cuda:1 or cpu (default: the current GPU, or the CPU)")
    add("--minutes", type=float, default=2.0, help="the time for all checks (default: 2)")
    add(
        "--all",
        action="store_true",
        help="also check every published method and very large tensors; needs about 20 minutes",
    )
    add("--json", action="store_true", help="print plain data")
    add("--quiet", action="store_true", help="do not print the name of each check to stderr")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    try:
        report = check_device(
            options.device,
            minutes=options.minutes,
            everything=options.all,
            progress=None if options.quiet else show_progress,
        )
    except ValueError as error:
        parser.error(f"--device: {error}")
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if not report.passed:
        raise SystemExit(1)


def show_progress(name: str) -> None:
    """Write the name of a check to stderr, so that the table on stdout stays as it is."""
    sys.stderr.write(f"checking {name}\n")
