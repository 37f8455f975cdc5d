"""The commands `python -m torchzero_clip audit` and `python -m torchzero_clip audit-clip`."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torchzero_clip.audit.clip_audit import audit_clip
from torchzero_clip.audit.function_names import function_named
from torchzero_clip.audit.step_audit import audit


def audit_clip_command(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the text of `audit_clip`. Then exit with code 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip audit-clip",
        description="Check whether a clip function computes the right norm, on 1 and on 4 ranks.",
    )
    add = parser.add_argument
    add(
        "function",
        help="the clip function, as package.module:name or file.py:name. It is called with "
        "parameters and max_norm",
    )
    add("--case", action="append", dest="cases", help="run only the case with this name")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        report = audit_clip(options.function, options.cases)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if not report.right:
        raise SystemExit(1)


SHAPES = ["512x128", "384x128", "384", "128x128", "128", "512x128", "512", "128x512", "128"]
"""The shapes of a small transformer."""


def audit_command(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the text of `audit`. Then exit with code 1 if the step synchronizes."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip audit",
        description="Run an optimizer step on a fake GPU. Print which lines synchronize with the "
        "GPU and which lines prevent a CUDA graph. The exit code is 1 if the step synchronizes.",
    )
    add = parser.add_argument
    add(
        "function",
        help="a function, as package.module:name or file.py:name. It is called with parameters, "
        "and returns an optimizer or a function that does a step. A function without arguments "
        "returns such a function and the parameters of a model",
    )
    add(
        "--shape",
        action="append",
        dest="shapes",
        help="the shape of a parameter, such as 512x128; repeat it for more parameters",
    )
    add("--graph", action="store_true", help="exit with 1 also if no CUDA graph is possible")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        make, params = _make_and_params(options.function, options.shapes or SHAPES)
        report = audit(make, params)
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error))
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if report.waits or report.ended or (options.graph and not report.capturable):
        raise SystemExit(1)


def _sizes(shape: str) -> list[int]:
    """Return the sizes in a text such as 512x128."""
    sizes = shape.split("x")
    if not all([size.isdecimal() for size in sizes]):
        raise ValueError(f"--shape must be sizes such as 512x128, got {shape!r}")
    return [int(size) for size in sizes]


def _make_and_params(name: str, shapes: Sequence[str]) -> tuple[Callable[[Any], Any], Any]:
    """Return the two arguments of `audit`, from the function with this name.

    If the function has a required argument, the function itself is the first argument of `audit`,
    and the parameters have the given shapes. Otherwise, the function returns both arguments.
    """
    function = function_named(name)
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any([x.default is x.empty and x.kind not in optional for x in parameters]):
        return function, [torch.empty(_sizes(shape)) for shape in shapes]
    returned = function()
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise TypeError(
        f"the function {name} has no arguments, so it must return a pair (make, params), got "
        f"{returned!r}. Here make(params) is a function that returns an optimizer or a step "
        "function, and params are the parameters of a model"
    )
