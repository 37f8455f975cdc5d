"""The program `python -m torchzero_clip`: print versions, explain a rule, or run a command."""

from __future__ import annotations

import argparse
import importlib
import inspect
import io
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import NamedTuple

import torch

import torchzero_clip
from torchzero_clip.core.formula import formula_of
from torchzero_clip.published import NAMES, instead_of, links_of

WIDTH = 100
public = partial(getattr, torchzero_clip)
BASES = ("AdaptiveRule", "Criterion")
"""Base classes in `modules` that are not rules themselves."""


class Command(NamedTuple):
    """A command of the program.

    Attributes:
        function: The function that yields the output. Its module is imported on first use.
        usage: The name of the command with its main argument, for the help text.
        summary: The purpose of the command, for the help text.
    """

    function: str
    usage: str
    summary: str


COMMANDS = {
    "simulate": Command(
        "study.simulate_command:command",
        "simulate RUN.csv",
        "show which steps of a recorded run other rules would have clipped",
    ),
    "lab": Command(
        "study.lab.lab_command:command",
        "lab [RUN.csv]",
        "try rules on a recorded run, on a page in your browser",
    ),
    "audit": Command(
        "audit.audit_command:audit_command",
        "audit FILE.py:FUNCTION",
        "find the lines of an optimizer step that synchronize with a GPU; needs no GPU",
    ),
    "audit-clip": Command(
        "audit.audit_command:audit_clip_command",
        "audit-clip FILE.py:FUNCTION",
        "test whether a clipping function computes the right norm",
    ),
    "audit-update": Command(
        "audit.update.update_command:audit_update_command",
        "audit-update FILE.py:FUNCTION",
        "show which parameters a training step moved, and how",
    ),
    "check-device": Command(
        "checking.device_command:check_device_command",
        "check-device",
        "check the numbers and the speed of this library on your GPU",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the output for the arguments. An unknown name prints an error and exits with code 2."""
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        for line in command(arguments[0])(arguments[1:]):
            print(line, flush=True)
        return
    parser = argparse.ArgumentParser(
        "python -m torchzero_clip",
        usage="%(prog)s [NAME] [--source]\n       %(prog)s COMMAND ...",
        description="Explain a rule, or run a command. Without arguments, list all rules.",
        epilog=command_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="a rule, function or method, such as ZClip or lamb")
    add("--source", action="store_true", help="print the method NAME as a file of plain torch")
    add("--version", action="version", version=torchzero_clip.__version__, help="print the version")
    options = parser.parse_args(arguments)
    name = options.name
    kinds = (type, FunctionType)
    shown = [n for n in torchzero_clip.__all__ if isinstance(public(n), kinds)]
    known = {n.lower(): n for n in shown}
    if name is not None and name not in NAMES and name not in shown:
        name = next((n for n in NAMES if n == name.lower()), known.get(name.lower(), name))
    if options.source and name in NAMES:
        from torchzero_clip.source import SourceError

        try:
            print(source_of(NAMES[name]()), end="")
        except SourceError as error:
            parser.error(str(error))
        return
    if options.source and (name is None or name in shown):
        parser.error(f"--source needs the name of an optimizer, such as lamb, got {name!r}")
    if name in NAMES:
        print("\n".join(recipe(name)))
        return
    if name is not None and name not in shown:
        parser.error(f"unknown name {name!r}: {instead_of(name, *known.values())}")
    print("\n".join(everything() if name is None else details(name)))


def command(word: str) -> Callable[[Sequence[str]], Iterator[str]]:
    """Return the function that yields the output of a command for the remaining arguments."""
    module, _, name = COMMANDS[word].function.partition(":")
    function: Callable[[Sequence[str]], Iterator[str]]
    function = getattr(importlib.import_module(f"torchzero_clip.{module}"), name)
    return function


def command_help() -> str:
    """Return the part of the help text that lists the commands."""
    rows = [(known.usage, known.summary) for known in COMMANDS.values()]
    more = "python -m torchzero_clip COMMAND --help describes the options of a command."
    return "\n".join(["commands:", *table(rows), "", more])


def everything() -> Iterator[str]:
    """Yield the installed versions, and the rules of each folder."""
    yield from table([("torchzero_clip", torchzero_clip.__version__), *surroundings()])
    folders: dict[str, list[tuple[str, str]]] = {}
    for name in torchzero_clip.__all__:
        path = getattr(public(name), "__module__", "").split(".")
        if inspect.isclass(public(name)) and path[1:2] == ["modules"] and name not in BASES:
            criterion = issubclass(public(name), torchzero_clip.Criterion)
            folder = "Criteria, for AdaptiveClip" if criterion else path[2].capitalize()
            folders.setdefault(folder, []).append((name, formula_of(public(name))))
    for folder in sorted(folders):
        yield from ("", folder, *table(folders[folder]))
    named = [(name, summary(NAMES[name])) for name in sorted(NAMES)]
    yield from ("", "Published optimizers, for named(...)", *table(named))
    yield from ("", "python -m torchzero_clip NAME prints more about a rule or a method.")
    yield "python -m torchzero_clip --help lists the commands."


def surroundings() -> Iterator[tuple[str, str]]:
    """Yield the versions of Python and torch, and the devices that torch can use."""
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "cpu", f"{torch.get_num_threads()} threads"
    if torch.accelerator.is_available():
        for i in range(torch.accelerator.device_count()):
            name = torch.cuda.get_device_name(i) if torch.cuda.is_available() else ""
            yield f"{torch.accelerator.current_accelerator()}:{i}", name


def table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table with two columns. Text in the second column is wrapped."""
    indent = max([len(left) for left, _ in rows if len(left) < WIDTH // 2], default=0) + 4
    for left, right in rows:
        lines = textwrap.wrap(right, WIDTH - indent) or [""]
        first = lines.pop(0) if len(left) <= indent - 4 else ""
        yield f"  {left:<{indent - 2}}{first}".rstrip()
        yield from (" " * indent + line for line in lines)


def details(name: str) -> Iterator[str]:
    """Yield the signature and the docstring of a public name."""
    yield from signature(name, public(name))
    live = getattr(public(name), "live", ())
    if isinstance(live, tuple) and live:
        yield f"live hyperparameters, stored in param_groups: {', '.join(live)}"
    yield from ("", inspect.getdoc(public(name)) or "")


def recipe(name: str) -> Iterator[str]:
    """Yield a published method: its arguments, the links of its chain, and its reference."""
    about, _, reference = (inspect.getdoc(NAMES[name]) or "").partition("\n\nReference:\n")
    yield from signature(name, NAMES[name])
    yield from ("", about, "")
    yield from table([(repr(link), formula) for link, formula in links_of(NAMES[name]())])
    yield from ("", "Reference:", reference)
    yield from ("", f'To use it: Modular(model.parameters(), named("{name}"))')


def source_of(chain: torchzero_clip.Chain) -> str:
    """Return the text of a file that runs a chain and imports only torch."""
    return torchzero_clip.Modular([torch.nn.Parameter(torch.zeros(1))], chain).to_source()


def signature(name: str, value: Callable[..., object]) -> list[str]:
    """Return the lines of a name and its arguments, without types."""
    parameters = inspect.signature(value).parameters.values()
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return textwrap.wrap(f"{name}{bare}", WIDTH, subsequent_indent=" " * (len(name) + 1))


def summary(value: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not support arrows in formulas
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        # Python flushes the output again at exit, and must not find the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
