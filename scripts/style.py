"""Find statements that put several reasons on one line.

    python -m scripts.style                 # every finding in the library
    python -m scripts.style --counts        # how many of each kind each package has

A finding is one of these:

- `tuple`: an assignment of a tuple to a tuple, unless it swaps or rotates the same names;
- `factor`: a list that is multiplied by a flag, or a flag that is a factor of a sum;
- `nested`: a conditional expression inside another one;
- `called`: a dict of lambdas, or a lambda, that is called where it is written.

`tests/project/test_style.py` requires that there are none.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from scripts.package_sizes import files, label, package_of


class Finding(NamedTuple):
    """A statement that should be written as several."""

    kind: str
    line: int
    code: str


def is_swap(node: ast.Assign) -> bool:
    """Return whether an assignment gives the same expressions other values among themselves."""
    (target,) = node.targets
    assert isinstance(target, ast.Tuple)
    assert isinstance(node.value, ast.Tuple)
    before = sorted(map(ast.unparse, target.elts))
    after = sorted(map(ast.unparse, node.value.elts))
    return before == after


def is_flag(node: ast.expr) -> bool:
    """Return whether an expression is a truth by its form: a comparison, `not x`, or `bool(x)`."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return any(map(is_flag, node.values))
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {
            "bool",
            "isinstance",
            "callable",
        }
    return isinstance(node, ast.Compare)


def is_sequence(node: ast.expr) -> bool:
    """Return whether an expression is a list, a tuple or a text by its form."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr))


def flags_of(tree: ast.AST) -> set[str]:
    """Return the names that are annotated as bool, or that are given a truth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            if ast.unparse(node.annotation) == "bool":
                names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "bool":
            names.add(ast.unparse(node.target).removeprefix("self."))
        elif isinstance(node, ast.Assign) and is_flag(node.value):
            names |= {ast.unparse(target).removeprefix("self.") for target in node.targets}
    return names


def findings(source: str) -> Iterator[Finding]:
    """Yield every finding in a source."""
    tree = ast.parse(source)
    flags = flags_of(tree)

    def truth(node: ast.expr) -> bool:
        return is_flag(node) or ast.unparse(node).removeprefix("self.") in flags

    def kind_of(node: ast.AST) -> str:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            to_tuple = any([isinstance(target, ast.Tuple) for target in node.targets])
            return "tuple" if to_tuple and not is_swap(node) else ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = [node.left, node.right]
            repeats = any(map(truth, sides)) and any(map(is_sequence, sides))
            return "factor" if repeats or any(map(is_flag, sides)) else ""
        if isinstance(node, ast.IfExp):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n is not node]
            return "nested" if inner else ""
        if isinstance(node, ast.Call):
            called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            return "called" if isinstance(called, (ast.Dict, ast.Lambda)) else ""
        return ""

    for node in ast.walk(tree):
        if kind := kind_of(node):
            assert isinstance(node, (ast.stmt, ast.expr))
            yield Finding(kind, node.lineno, ast.unparse(node).splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", action="store_true", help="count by package and kind")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for path in files():
        for found in findings(path.read_text()):
            counts[package_of(path), found.kind] += 1
            if not arguments.counts:
                print(f"{label(path)}:{found.line}: {found.kind}: {found.code}")
    if arguments.counts:
        for (package, kind), count in sorted(counts.items()):
            print(f"{count:>5}  {kind:<8}{package}")


if __name__ == "__main__":
    main()
