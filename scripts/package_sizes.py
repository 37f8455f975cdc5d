"""Count the size of each package, and check which package imports which.

    python scripts/package_sizes.py

Prints the syntax nodes of each package next to its limit (docstrings are not counted), the rules
whose file is too long, every import that goes the wrong way, and the functions that one step of the
headline chain enters. The limits leave about 10 % of headroom. A limit is raised by a decision
about the design, never to make one change fit, and it is no reason to write denser code.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this tree is measured, wherever another is installed
NAME = "torchzero_clip"
PACKAGE = ROOT / NAME

MOST_NODES = {  # of one package; modules has no limit, because a new rule is always welcome
    "core": 80_000,
    "engines": 66_000,
    "optimizer": 32_600,
    "source": 33_000,
    "published": 5_700,
    "attach": 5_100,
    "releasing": 3_900,
    "recovering": 8_200,
    "helpers": 12_000,
    "top": 2_200,
    "study": 26_800,
    "audit": 29_000,
    "checking": 9_700,
    "spec": 6_600,
}
MOST_LINES_OF_A_RULE = 80  # code lines of the file that defines a rule

PACKAGES = {  # what the files of a package may import
    "core": {"core"},
    "engines": {"core", "engines"},
    "source": {"core", "engines", "modules", "source"},
    "optimizer": {"core", "engines", "optimizer", "source"},
    "modules": {"core", "modules"},
    "published": {"core", "modules", "published"},
    "attach": {"core", "modules", "optimizer", "attach", "helpers"},
    "releasing": {"core", "engines", "optimizer", "releasing"},
    "helpers": {"core", "engines", "modules", "optimizer", "helpers"},
    "study": {"core", "optimizer", "attach", "helpers", "study", "top"},
    "audit": {"core", "engines", "attach", "audit"},
    "checking": {"core", "modules", "published", "optimizer", "audit", "checking", "top"},
    "recovering": {"core", "optimizer", "attach", "study", "recovering"},
    "spec": {"spec"},
}
COMPILED = {  # and what those of the compiled engine may of each other
    "printers": {"printers"},
    "lists": {"lists", "printers"},
    "replay": {"replay", "printers"},
}
PACKAGES["top"] = PACKAGES.keys() - {"engines"} | {"top"}
PACKAGE_OF_FILE = {  # the packages of files that are in no folder
    **dict.fromkeys(("__init__.py", "__main__.py", "_lazy_imports.py"), "top"),
    **dict.fromkeys(("grads.py", "compat.py", "per_example.py", "testing.py"), "helpers"),
    **dict.fromkeys(("grouping.py", "optimizer_class.py", "scheduling.py"), "helpers"),
    **dict.fromkeys(("batch_norm.py", "floats.py"), "helpers"),
}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SILENT |= {tokenize.ENCODING, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Count:
    """A size that was counted, and its limit."""

    what: str
    value: int
    limit: int

    @property
    def holds(self) -> bool:
        """Whether the size is within its limit, and anything was counted at all."""
        return 0 < self.value <= self.limit

    def __str__(self) -> str:
        verdict = "ok"
        if not self.holds:
            verdict = "TOO MANY" if self.value else "NOTHING"
        return f"{verdict:<10}{self.value:>7,} ≤ {self.limit:<8,}{self.what}"


# ---------------------------------------------------------------------- sizes


def syntax_nodes(source: str) -> int:
    """Count the nodes of the syntax tree of a source, without its docstrings."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in nodes if isinstance(node, documented)]
    docstrings = [owner for owner in owners if ast.get_docstring(owner) is not None]
    return len(nodes) - 2 * len(docstrings)  # a statement and the string in it


def code_lines(source: str) -> int:
    """Count the lines of a source that hold code: no docstring, comment or blank line."""
    docs = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in SILENT]
    return len(set(itertools.chain(*lines)) - docs)


def files(*packages: str) -> list[Path]:
    """Return the Python files of some packages, or of the whole library."""
    folders = [PACKAGE / name for name in packages] or [PACKAGE]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def package_of(path: Path) -> str:
    """Return the package of a file: its folder, or what PACKAGE_OF_FILE says."""
    first, *_ = label(path).split("/")
    if first not in PACKAGES and first not in PACKAGE_OF_FILE:
        raise LookupError(
            f"{label(path)} has no package: make its folder one of PACKAGES, or move it"
        )
    return PACKAGE_OF_FILE.get(first, first)


def sizes() -> Iterator[Count]:
    """Count the syntax nodes of each package that has a limit."""
    nodes = dict.fromkeys(PACKAGES, 0)
    for path in files():
        nodes[package_of(path)] += syntax_nodes(path.read_text())
    for name, limit in MOST_NODES.items():
        yield Count(f"syntax nodes of {name}", nodes[name], limit)


def pages() -> Iterator[Count]:
    """Count the code lines of each file that defines a rule: one that has a page in the docs."""
    documented = {page.stem for page in (ROOT / "docs" / "modules").rglob("*.md")}
    for path in files("modules"):
        if path.stem in documented:
            lines = code_lines(path.read_text())
            yield Count(f"code lines of {label(path)}", lines, MOST_LINES_OF_A_RULE)


# ---------------------------------------------------------------------- imports


def imports(source: str, inside: str) -> Iterator[str]:
    """The full name of everything a source imports, functions and TYPE_CHECKING included.

    `inside` is the package it lies in, which relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = inside.split(".")
            base = folders[: len(folders) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    inside = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    return frozenset(imports(path.read_text(), inside))


def home(name: str) -> Path | None:
    """The file that defines an imported name: packages that only hand it on are passed through."""
    root, *_ = *folders, last = name.split(".")
    if root != NAME:
        return None
    folder = PACKAGE.parent.joinpath(*folders)
    if (folder / last / "__init__.py").exists():
        return folder / last / "__init__.py"
    if (folder / f"{last}.py").exists():
        return folder / f"{last}.py"
    if folder.with_suffix(".py").exists():
        return folder.with_suffix(".py")
    package = folder / "__init__.py"
    handed = {full for full in imports_of(package) if full.rpartition(".")[2] == last}
    starred = [full for full in imports_of(package) if full.endswith(".*")]
    found = [home(full) for full in handed - {name}]
    found += [home(full.removesuffix("*") + last) for full in starred if not handed]
    return next((path for path in found if path and path.name != "__init__.py"), package)


@functools.cache
def arrows() -> dict[Path, set[Path]]:
    """For each file of the package, the files that it imports from."""
    found = {path: {home(name) for name in imports_of(path)} for path in files()}
    return {path: {to for to in homes if to and to != path} for path, homes in found.items()}


def outside(path: Path) -> set[str]:
    """Return what a file imports from packages, or folders of rules, that it must not import."""
    mine = package_of(path)
    wrong = {label(to) for to in arrows()[path] if package_of(to) not in PACKAGES[mine]}
    _, *below = label(path).split("/")
    if mine == "modules" and len(below) > 1:
        own = (f"modules/{below[0]}/", "core/")
        wrong |= {label(to) for to in arrows()[path] if not label(to).startswith(own)}
    known = COMPILED.get(path.parent.name, set(COMPILED))
    return wrong | {label(to) for to in arrows()[path] if to.parent.name in COMPILED.keys() - known}


def circles(graph: dict[Path, set[Path]]) -> list[list[Path]]:
    """Files that import each other, directly or through others."""

    def reached(start: Path) -> set[Path]:
        seen: set[Path] = set()
        ahead = list(graph[start])
        while ahead:
            if (path := ahead.pop()) not in seen:
                seen.add(path)
                ahead += graph.get(path, ())
        return seen

    reach = {path: reached(path) for path in graph}
    found = {
        tuple(sorted(other for other in reach[path] if path in reach.get(other, ())))
        for path in graph
        if path in reach[path]
    }
    return [list(circle) for circle in sorted(found)]


@functools.cache
def engine_classes() -> set[str]:
    trees = [ast.parse(engine.read_text()) for engine in files("engines")]
    return {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}


def engine_names(path: Path) -> set[str]:
    """The names of classes of engines/ that a file speaks of in its code."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return engine_classes() & names


# ---------------------------------------------------------------------- the functions of a step


@functools.cache
def functions(path: str) -> list[tuple[int, int, str]]:
    """First line, last line and full name of each function in a file; inner ones come later."""
    found = []

    def visit(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{inside}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *[d.lineno for d in child.decorator_list]])
                    found.append((first, child.end_lineno or first, name))
                visit(child, f"{name}.")
            else:
                visit(child, inside)

    visit(ast.parse(Path(path).read_text()), "")
    return found


def enclosing(path: str, line: int) -> str:
    """The function that a line belongs to: lambdas and comprehensions count as part of it."""
    names = [name for first, last, name in functions(path) if first <= line <= last]
    return names[-1] if names else "<module>"


def entered(call: Any) -> dict[str, list[str]]:
    """The functions of ours that a call enters, by file."""
    seen: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    ours = {(path, enclosing(path, line)) for path, line in seen if path.startswith(str(PACKAGE))}
    rows = sorted((label(Path(path)), name) for path, name in ours)
    return {
        path: [name for _, name in group]
        for path, group in itertools.groupby(rows, key=lambda row: row[0])
    }


def headline() -> Callable[[], None]:
    """Return a function that does one step of the headline chain, in the steady state."""
    import torch

    import torchzero_clip as tz

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(32, 16), (32,), (4, 32), (4,)]]
    chain = tz.ClipNorm(1.0, dim="global"), tz.Adam(), tz.LR(1e-3)
    opt = tz.Modular(params, *chain)

    def step() -> None:
        opt.step()

    for p in params:
        p.grad = torch.randn_like(p)  # its norm is far above 1
    for _ in range(3):
        step()
    return step


def main() -> None:
    for count in sizes():
        print(count)
    for count in pages():
        if not count.holds:
            print(count)
    for path in files():
        for wrong in sorted(outside(path)):
            print(f"{label(path)} must not import {wrong}")
        if label(path).startswith(("core", "modules")) and (names := engine_names(path)):
            print(f"{label(path)} names classes of an engine: {sorted(names)}")
    for circle in circles(arrows()):
        print("a circle of imports:", *map(label, circle))
    way = entered(headline())
    print(f"\nA step of the headline chain enters {sum(map(len, way.values()))} functions:")
    for file, names in way.items():
        print(f"{file} ({len(names)})", *names, sep="\n    ")


if __name__ == "__main__":
    main()
