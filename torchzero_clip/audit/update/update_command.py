"""The command `python -m torchzero_clip audit-update`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from torchzero_clip.audit.function_names import function_named
from torchzero_clip.audit.update.expected import expected_of
from torchzero_clip.audit.update.update_audit import audit_update


def audit_update_command(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the text of `audit_update`. Then exit with code 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip audit-update",
        description="Run one training step, and report which parameters moved and how. The exit "
        "code is 1 if there is a finding, and 2 if the audit could not run.",
    )
    add = parser.add_argument
    add(
        "function",
        help="package.module:name or file.py:name; called without arguments, it returns a model, "
        "an optimizer or a list of optimizers, and a function that runs one training step",
    )
    add(
        "--expect",
        action="append",
        default=[],
        metavar="PATTERN=KIND",
        help='the kind of step of some parameters, such as "*.weight=orthogonal"; may be repeated',
    )
    add("--after", type=int, default=0, help="run this many steps before the audited step")
    add("--steps", type=int, default=1, help="the number of steps that the optimizer should make")
    add("--max-ratio", type=float, default=2.0, help="the largest ratio of step and weight")
    add("--json", action="store_true", help="print plain data")
    options = parser.parse_args(arguments)
    try:
        expect = dict(map(_pattern_and_kind, options.expect))
        model, optimizer, step = _made(options.function)
        expected_of(dict(model.named_parameters()), expect)
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    for _ in range(options.after):
        step()
    with audit_update(
        model, optimizer, expect=expect, steps=options.steps, max_ratio=options.max_ratio
    ) as report:
        step()
    yield json.dumps(report.as_dict(), indent=1) if options.json else str(report)
    if report.findings:
        raise SystemExit(1)


def _pattern_and_kind(text: str) -> tuple[str, str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals:
        raise ValueError(
            f'--expect must have the form PATTERN=KIND, such as "*=sign", got {text!r}'
        )
    return pattern, kind


def _made(name: str) -> tuple[nn.Module, Any, Callable[[], object]]:
    """Return the model, the optimizer and the step that the function with this name returns."""
    returned = function_named(name)()
    if isinstance(returned, tuple) and len(returned) == 3:
        model, optimizer, step = returned
        if isinstance(model, nn.Module) and callable(step):
            return model, optimizer, step
    raise TypeError(
        f"{name} must return three things: a model, an optimizer, and a function that runs one "
        f"training step; got {returned!r}"
    )
