"""The program `python -m torchzero_clip`: print versions, explain a rule, or run a command."""

from __future__ import annotations

import argparse
import importlib
import inspect
import io
import platform
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType

import torch

import torchzero_clip
from torchzero_clip.core.formula import formula_of
from torchzero_clip.published import NAMES, instead_of, links_of

WIDTH = 100
public = partial(getattr, torchzero_clip)
BASES = ("AdaptiveRule", "Criterion")
"""Base classes in `modules` that are not rules themselves."""
COMMANDS = {
    "simulate": "study.simulate_command:command",
    "lab": "study.lab.lab_command:command",
    "audit": "audit.audit_command:audit_command",
    "audit-clip": "audit.audit_command:audit_clip_command",
    "audit-update": "audit.update.update_command:audit_update_command",
}
"""For each command, the function that yields its output. The module is imported on first use."""


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
        epilog="python -m torchzero_clip simulate run.csv: what rules would have done to a run; "
        "python -m torchzero_clip lab run.csv: the same to look at, in a browser; "
        "python -m torchzero_clip audit package.module:function: whether a step waits for a GPU; "
        "python -m torchzero_clip audit-clip package.module:function: whether its norms are right; "
        "python -m torchzero_clip audit-update file.py:function: what moved in a training step.",
    )
    parser.add_argument("name", nargs="?", help="show this rule or function, not the list of all")
    parser.add_argument("--version", action="version", version=torchzero_clip.__version__)
    parser.add_argument("--source", action="store_true", help="print NAME as a file of plain torch")
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
        parser.error(f"--source needs a name that named(...) accepts, such as lamb, got {name!r}")
    if name in NAMES:
        print("\n".join(recipe(name)))
        return
    if name is not None and name not in shown:
        parser.error(f"there is no {name!r}: {instead_of(name, *known.values())}")
    print("\n".join(everything() if name is None else details(name)))


def command(word: str) -> Callable[[Sequence[str]], Iterator[str]]:
    """Return the function that yields the output of a command for the remaining arguments."""
    module, _, name = COMMANDS[word].partition(":")
    function: Callable[[Sequence[str]], Iterator[str]]
    function = getattr(importlib.import_module(f"torchzero_clip.{module}"), name)
    return function


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
    yield from ("", "Names people know, for named(...)", *table(named))
    yield from ("", "python -m torchzero_clip NAME says more about one of them.")


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
        yield f"live, in param_groups: {', '.join(live)}"
    yield from ("", inspect.getdoc(public(name)) or "")


def recipe(name: str) -> Iterator[str]:
    """Yield a published method: its arguments, the links of its chain, and its reference."""
    about, _, reference = (inspect.getdoc(NAMES[name]) or "").partition("\n\nReference:\n")
    yield from signature(name, NAMES[name])
    yield from ("", about, "")
    yield from table([(repr(link), formula) for link, formula in links_of(NAMES[name]())])
    yield from ("", "Reference:", reference)
    yield from ("", f'Modular(model.parameters(), named("{name}")) is the optimizer.')


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
    main()
