"""python -m torchzero_clip audit-clip package.module:function: whether its norms are right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence


def audit_clip_command(given: Sequence[str]) -> Iterator[str]:
    """What `audit_clip` finds, to be printed; then exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip audit-clip",
        description="Try a clip function on gradients whose norm is known, in four processes.",
    )
    add = parser.add_argument
    add("function", help="package.module:name or file.py:name; called with parameters and a norm")
    add("--case", action="append", dest="cases", help="a case by its name, instead of all")
    add("--json", action="store_true", help="print plain data")
    options = parser.parse_args(given)
    from torchzero_clip.audit import audit_clip  # which no other command needs

    try:
        report = audit_clip(options.function, options.cases)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if not report.right:
        raise SystemExit(1)
