"""The command `python -m torchzero_clip simulate run.csv`, and a parser for rules as text."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchzero_clip.core import NormRule, from_config
from torchzero_clip.core.description import Description
from torchzero_clip.core.plurals import counted
from torchzero_clip.study.logs import read
from torchzero_clip.study.simulating import Simulation, simulate
from torchzero_clip.study.trace import Trace

RULES = ("ZClip(max_norm=None)", "AutoClip()", "ClipNormGrowth(dim='global')", "AdaGC()")
PLOTS = (".png", ".svg", ".pdf")
"""The ends of the file names of plots."""
SHOWN_LENGTH = 80
"""The largest number of characters of a rule that an error message shows."""


def command(argv: Sequence[str]) -> Iterator[str]:
    """Yield the lines that the command prints, and draw the simulation into a file."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip simulate",
        description="Show what clipping rules would have done to the norms of a recorded run.",
    )
    add = parser.add_argument
    add("run", help="a log file, for example from Recorder.to_csv")
    usual = ", ".join([*RULES, "and ClipNorm at twice the median"])
    add(
        "rules",
        nargs="*",
        default=[],
        metavar="RULE",
        help=f"rules as Python code; by default {usual}",
    )
    add("--norms", help="the name of the column with the norms; by default the first such column")
    add("--out", default="simulate.png", help="the plot, as .png, .svg or .pdf (simulate.png)")
    options = parser.parse_intermixed_args(argv)  # options may be between the file and the rules
    if not options.out.lower().endswith(PLOTS):
        parser.error(f"--out must end in {' or '.join(PLOTS)}, got {options.out!r}")
    try:
        log = read(Path(options.run))
        column = log.choose(options.norms)
        trace = Trace.from_log(log, column)
        simulation = simulate(trace, *map(rule, options.rules or usual_rules(trace)))
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    rows = counted(len(trace), "step")
    if trace.stride > 1:
        rows = f"{counted(len(trace), 'row')}, one for every {trace.stride} steps,"
    norms = counted(len(trace.names), "norm")
    median = "the median norm" if len(trace.names) == 1 else "the median of their total norm"
    middle = f"{median} is {trace.median:.4g}"
    if not trace.total.isfinite().any():
        middle = "all norms are NaN or infinite, so no rule can be simulated"
    yield f"{rows} with {norms}; {middle}"
    others = [name for name in log.norms if name != column]
    if options.norms is None and others:
        yield (
            f"The norms are from the column {column!r}. To use another column of norms, pass "
            f"--norms with one of {others}."
        )
    yield from table(simulation)
    try:
        simulation.plot(options.out)
        drawn = f"The plot is in {options.out}."
    except ModuleNotFoundError as error:
        drawn = f"There is no plot: {error}."
    except OSError as error:
        parser.error(f"the plot cannot be written: {error}")
    yield f"{drawn} Clipping does not change later norms in a simulation, as it would in training."


def usual_rules(trace: Trace) -> list[str]:
    """Return the rules that the command simulates if the user names no rules."""
    rules = list(RULES)
    twice = 2 * trace.median
    if 0 < twice < math.inf:
        rules.append(f"ClipNorm({twice:.3g}, dim='global')")
    return rules


def table(simulation: Simulation) -> Iterator[str]:
    """Yield a line for each rule: the share of clipped steps, and the largest norm after clipping.

    If the trace contains which steps are bad, the line also has the share of false alarms and the
    share of missed bad steps.
    """
    has_norms = not simulation.trace.total.isnan().all()
    shares = simulation.clipped.double().mean(0).tolist()
    largest = simulation.left.amax(0).tolist()
    header = ["rule", "clipped", "largest left"]
    lines = []
    for name, share, left in zip(simulation.metrics, shares, largest, strict=True):
        lines.append([name, f"{share:.1%}", f"{left:.4g}" if has_norms else "nan"])
    if simulation.trace.spikes is not None:
        header += ["false alarms", "missed"]
        false_alarms, missed = [x.tolist() for x in simulation.alarms()]
        for line, false_share, missed_share in zip(lines, false_alarms, missed, strict=True):
            line += [f"{false_share:.1%}", f"{missed_share:.1%}"]
    lines.insert(0, header)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  ".join([line[0].ljust(widths[0]), *cells[1:]])


def rule(text: str) -> NormRule:
    """Return the rule in a text of Python code. The text is parsed, but never executed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        parsed = from_config(literal(tree)) if isinstance(tree, (ast.Name, ast.Call)) else None
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):  # the last two: deep nesting
        raise ValueError(
            f"a rule must be Python code such as ZClip(max_norm=None), got {shortened(text)}"
        ) from None
    except OverflowError:
        raise ValueError(
            f"all numbers of a rule must fit into a float, got {shortened(text)}"
        ) from None
    if not isinstance(parsed, NormRule):
        raise ValueError(
            f"simulate supports only rules that clip norms, such as ZClip(), got {shortened(text)}"
        )
    return parsed


def literal(node: ast.expr) -> Any:
    """Return an expression as a config, which is a rule with arguments, or as a literal value."""
    match node:
        case ast.Name(name) | ast.Attribute(ast.Name("math"), name) if name in ("inf", "nan"):
            return float(name)
        case ast.Name(name):
            return {"type": name}
        case ast.Call(ast.Name("float"), [ast.Constant(str(text))], []):
            return float(text)
        case ast.Call(ast.Name(name), positional, keywords):
            return {"type": name, **arguments(name, positional, keywords)}
        case ast.Tuple(elements) | ast.List(elements):
            return [*map(literal, elements)]
        case ast.UnaryOp(ast.USub() | ast.UAdd(), ast.Constant(int() | float())):
            return ast.literal_eval(node)
        case ast.Constant(None | bool() | float() | str()):
            return node.value
        case ast.Constant(int() as number):
            float(number)  # raises OverflowError if the number is too large
            return number
    raise not_literal(node)


def not_literal(node: ast.AST) -> ValueError:
    """Return the error for an expression that would have to be computed."""
    return ValueError(
        "the arguments of a rule must be numbers, strings, None, True or False, as in "
        f"ZClip(max_norm=None), got {shortened(ast.unparse(node))}"
    )


def arguments(
    name: str, positional: Sequence[ast.expr], keywords: Sequence[ast.keyword]
) -> dict[str, Any]:
    """Return the arguments of a rule by name.

    Args:
        name: The name of the rule.
        positional: The arguments without a name.
        keywords: The arguments with a name.
    """
    by_name: dict[str, Any] = {}
    values = [*map(literal, positional)]
    if name in Description.registry:  # otherwise from_config raises an error that says more
        signature = inspect.signature(Description.registry[name])
        try:
            by_name.update(signature.bind_partial(*values).arguments)
        except TypeError:
            raise ValueError(
                f"{name} has the arguments {[*signature.parameters]}, got {len(values)} positional "
                "arguments"
            ) from None
    for keyword in keywords:
        if keyword.arg is None:
            raise not_literal(keyword.value)
        if keyword.arg in by_name:
            raise ValueError(f"{name}: the argument {keyword.arg!r} was passed twice")
        if keyword.arg in ("type", "links"):  # keys of a config that are no arguments
            raise ValueError(f"{name} has no argument {keyword.arg!r}")
        by_name[keyword.arg] = literal(keyword.value)
    return by_name


def shortened(text: str) -> str:
    """Return a text, or its beginning if it is long."""
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}…"
