"""python -m torchzero_clip replay run.csv: rules on the norms of a recorded run."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torchzero_clip.core import NormRule, from_config
from torchzero_clip.core.description import Description
from torchzero_clip.replaying import replay
from torchzero_clip.trace import Trace

RULES = ("ZClip(max_norm=None)", "AutoClip()", "ClipNormGrowth(dim='global')", "AdaGC()")


def command(given: Sequence[str]) -> Iterator[str]:
    """The lines to print; the picture is drawn on the way."""
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip replay",
        description="What rules would have done to the norms of a recorded run.",
    )
    add = parser.add_argument
    add("run", help="a file of Recorder.to_csv")
    usual = ", ".join([*RULES, "and ClipNorm at twice the median"])
    add("rules", nargs="*", metavar="RULE", help=f"as in Python; without any: {usual}")
    add("--norms", help="the column of the norms; by default those of the first rule")
    add("--out", default="replay.png", help="the picture: .png, .svg or .pdf (replay.png)")
    options = parser.parse_args(given)
    try:
        trace = Trace.read(options.run, options.norms)
        median = trace.total.nanmedian().item()
        texts = options.rules or [*RULES, f"ClipNorm({2 * median:.3g}, dim='global')"]
        done = replay(trace, *map(rule, texts))
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    each = f", the largest of {trace.stride} in a row" if trace.stride > 1 else ""
    norms = "1 norm" if len(trace.names) == 1 else f"{len(trace.names)} norms"
    yield f"{len(trace)} steps of {norms}{each}; the median of all {median:.4g}"
    yield from table(done)
    try:
        done.plot(options.out)
        drawn = f"Drawn in {options.out}."
    except ModuleNotFoundError as error:
        drawn = f"No picture: {error}."
    yield f"{drawn} Open loop: the norms are those of the run as it was."


def table(done: Any) -> Iterator[str]:
    """A line for each rule: the steps it clips, and the norm that is left of the largest."""
    judged = done.trace.spikes is not None
    head = ["rule", "clipped", "largest left", *(["false alarms", "missed"] if judged else [])]
    shares, largest = done.clipped.double().mean(0).tolist(), done.left.amax(0).tolist()
    lines = [head]
    for name, share, left in zip(done.metrics, shares, largest, strict=True):
        lines.append([name, f"{share:.1%}", f"{left:.4g}"])
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
        made = from_config(literal(ast.parse(text.strip(), mode="eval").body))
    except SyntaxError:
        raise ValueError(f"a rule is written like ZClip(max_norm=None), got {text}") from None
    if not isinstance(made, NormRule):
        raise ValueError(f"replay takes rules about norms, such as ZClip(), got {text}")
    return made


def literal(node: ast.expr) -> Any:
    """A node as a config: a rule with its arguments, or a literal."""
    if isinstance(node, ast.Name):
        return {"type": node.id}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        given: dict[str, Any] = {}
        if name in Description.registry:  # if not, from_config has a better sentence
            signature = inspect.signature(Description.registry[name])
            given = signature.bind_partial(*map(literal, node.args)).arguments
        return {"type": name, **given, **{str(k.arg): literal(k.value) for k in node.keywords}}
    return ast.literal_eval(node)
