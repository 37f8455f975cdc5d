"""python -m torchzero_clip audit and audit-clip: whether a step waits, and norms are right."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchzero_clip.audit.clip_audit import audit_clip
from torchzero_clip.audit.function_names import found_by
from torchzero_clip.audit.step_audit import audit


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
    try:
        report = audit_clip(options.function, options.cases)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if not report.right:
        raise SystemExit(1)


SHAPES = ["512x128", "384x128", "384", "128x128", "128", "512x128", "512", "128x512", "128"]


def audit_command(given: Sequence[str]) -> Iterator[str]:
    """What `audit` finds, to be printed; then exit code 1 where the step waits."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip audit",
        description="Do a step on an imagined GPU, and say where it waits for the device and what "
        "keeps it from a CUDA graph. Exit code 1 where it waits.",
    )
    add = parser.add_argument
    add(
        "function",
        help="package.module:name or file.py:name; called with parameters it returns an optimizer "
        "or a function that does a step; one without arguments returns such a function and the "
        "parameters of a model",
    )
    add("--shape", action="append", dest="shapes", help="of a parameter, as 512x128; for each one")
    add("--graph", action="store_true", help="exit code 1 where no CUDA graph can be had, too")
    add("--json", action="store_true", help="print plain data")
    options = parser.parse_args(given)
    try:
        make, params = _asked(options.function, options.shapes or SHAPES)
        report = audit(make, params)
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error))
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if report.waits or report.ended or (options.graph and not report.capturable):
        raise SystemExit(1)


def _asked(name: str, shapes: Sequence[str]) -> tuple[Callable[[Any], Any], Any]:
    """What makes the step, and the parameters."""
    function = found_by(name)
    arguments = inspect.signature(function).parameters.values()
    if any([x.default is x.empty and x.kind not in (2, 4) for x in arguments]):
        return function, [torch.empty([int(n) for n in shape.split("x")]) for shape in shapes]
    told = function()
    if isinstance(told, tuple) and len(told) == 2:
        return told
    raise TypeError(
        f"{name} takes no argument, so it returns what makes the step and the parameters of a "
        f"model, as a pair; got {told!r}"
    )
