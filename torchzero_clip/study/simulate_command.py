"""python -m torchzero_clip simulate run.csv: rules on the norms of a recorded run."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torchzero_clip.core import NormRule, from_config
from torchzero_clip.core.description import Description
from torchzero_clip.study.simulating import simulate
from torchzero_clip.study.trace import Trace

RULES = ("ZClip(max_norm=None)", "AutoClip()", "ClipNormGrowth(dim='global')", "AdaGC()")
LONGEST = 80  # letters of a rule that a sentence repeats


def command(given: Sequence[str]) -> Iterator[str]:
    """The lines to print; the picture is drawn on the way."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip simulate",
        description="What rules would have done to the norms of a recorded run.",
    )
    add = parser.add_argument
    add("run", help="a file of Recorder.to_csv")
    usual = ", ".join([*RULES, "and ClipNorm at twice the median"])
    add("rules", nargs="*", metavar="RULE", help=f"as in Python; without any: {usual}")
    add("--norms", help="the column of the norms; by default those of the first rule")
    add("--out", default="simulate.png", help="the picture: .png, .svg or .pdf (simulate.png)")
    options = parser.parse_args(given)
    try:
        trace = Trace.read(options.run, options.norms)
        done = simulate(trace, *map(rule, options.rules or usual_rules(trace)))
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    each = f", the largest of {trace.stride} in a row" if trace.stride > 1 else ""
    norms = "1 norm" if len(trace.names) == 1 else f"{len(trace.names)} norms"
    middle = f"the median of all {trace.median:.4g}"
    if not trace.total.isfinite().any():
        middle = "none is a finite number, so a rule has nothing to go by"
    yield f"{len(trace)} steps of {norms}{each}; {middle}"
    yield from table(done)
    try:
        done.plot(options.out)
        drawn = f"Drawn in {options.out}."
    except ModuleNotFoundError as error:
        drawn = f"No picture: {error}."
    yield f"{drawn} Open loop: the norms are those of the run as it was."


def usual_rules(trace: Trace) -> list[str]:
    """What is simulated where nothing was asked for."""
    twice = 2 * trace.median
    return [*RULES, *([f"ClipNorm({twice:.3g}, dim='global')"] if 0 < twice < math.inf else [])]


def table(done: Any) -> Iterator[str]:
    """A line for each rule: the steps it clips, and the norm that is left of the largest."""
    judged = done.trace.spikes is not None
    head = ["rule", "clipped", "largest left", *(["false alarms", "missed"] if judged else [])]
    shares, largest = done.clipped.double().mean(0).tolist(), done.left.amax(0).tolist()
    lines, nothing = [head], bool(done.trace.total.isnan().all())
    for name, share, left in zip(done.metrics, shares, largest, strict=True):
        lines.append([name, f"{share:.1%}", "nan" if nothing else f"{left:.4g}"])
    if judged:
        for line, *pair in zip(lines[1:], *[x.tolist() for x in done.alarms()], strict=True):
            line += [f"{x:.1%}" for x in pair]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(wide) for cell, wide in zip(line, widths, strict=True)]
        yield "  ".join([line[0].ljust(widths[0]), *cells[1:]])


def rule(text: str) -> NormRule:
    """A rule from its spelling in Python, which is read and never run."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        made = from_config(literal(tree)) if isinstance(tree, (ast.Name, ast.Call)) else None
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):  # the last two: it nests deep
        raise ValueError(
            f"a rule is written like ZClip(max_norm=None), got {shortened(text)}"
        ) from None
    except OverflowError:
        raise ValueError(
            f"a rule takes numbers that a float can hold, got {shortened(text)}"
        ) from None
    if not isinstance(made, NormRule):
        raise ValueError(
            f"simulate takes rules about norms, such as ZClip(), got {shortened(text)}"
        )
    return made


def literal(node: ast.expr) -> Any:
    """A node as a config: a rule with its arguments, or a value that is written out."""
    match node:
        case ast.Name(name) | ast.Attribute(ast.Name("math"), name) if name in ("inf", "nan"):
            return float(name)
        case ast.Name(name):
            return {"type": name}
        case ast.Call(ast.Name("float"), [ast.Constant(str(text))], []):
            return float(text)
        case ast.Call(ast.Name(name), given, named):
            return {"type": name, **arguments(name, given, named)}
        case ast.Tuple(entries) | ast.List(entries):
            return [*map(literal, entries)]
        case ast.UnaryOp(ast.USub() | ast.UAdd(), ast.Constant(int() | float())):
            return ast.literal_eval(node)
        case ast.Constant(None | bool() | float() | str()):
            return node.value
        case ast.Constant(int() as number):
            float(number)  # or it overflows
            return number
    raise not_written_out(node)


def not_written_out(node: ast.AST) -> ValueError:
    """The sentence for what would have to be computed."""
    return ValueError(
        "a rule is written with numbers, text, None, True and False, as in ZClip(max_norm=None), "
        f"and nothing in it is computed: got {shortened(ast.unparse(node))}"
    )


def arguments(name: str, given: Sequence[ast.expr], named: Sequence[ast.keyword]) -> dict[str, Any]:
    """The arguments of a rule by their names."""
    found: dict[str, Any] = {}
    values = [*map(literal, given)]
    if name in Description.registry:  # if not, from_config has a better sentence
        signature = inspect.signature(Description.registry[name])
        try:
            found.update(signature.bind_partial(*values).arguments)
        except TypeError:
            raise ValueError(
                f"{name} takes {[*signature.parameters]}, got {len(values)} values without a name"
            ) from None
    for one in named:
        if one.arg is None:
            raise not_written_out(one.value)
        if one.arg in found:
            raise ValueError(f"{name}: there may be one {one.arg}, got two")
        if one.arg in ("type", "links"):  # a config's own words
            raise ValueError(f"{name} has no argument {one.arg!r}")
        found[one.arg] = literal(one.value)
    return found


def shortened(text: str) -> str:
    """What was written, or its beginning."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
