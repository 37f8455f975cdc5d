"""The package is a guest: it writes to its own objects, and changes nothing that others use."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from scripts.package_sizes import files, imports_of, label

BREAKING_IN = {"_getframe", "currentframe", "setprofile", "settrace", "mock", "patch"}
SETS = ("setattr", "object.__setattr__")
MADE_HERE = {
    "core/gradients.py": {"p"},  # the gradient of a parameter, in the attribute that was named
    "attach/handle.py": {"optimizer"},  # which a user gives it to be marked
    "audit/fake_gpu.py": {"memory"},
    "core/bucket.py": {"other"},
    "core/description.py": {"other"},
    "core/logical_matrices.py": {"owner"},  # frozen, and under construction
    "core/overrides.py": {"cls"},  # a class that is being defined
    "engines/buffers.py": {"buffer"},
    "engines/compiled/replay/captures.py": {"graph"},
    "optimizer/explain.py": {"other"},  # a copy of a rule, with the values that act
    "source/rule_names.py": {"node", "other", "reporting"},
    "source/written_numbers.py": {"kind"},
}
"""Names of objects that a function changes past their attributes, since it has just made them."""
OF_NEW_OBJECTS = {"grad", "measure"}  # of the stand-in of a parameter, and of lists
OF_NEW_OBJECTS |= {"decorator_list", "__kwdefaults__"}  # of copies of functions
OF_NEW_OBJECTS |= {"__hash__", "__neg__"}  # of our numbers
"""Attributes of what the lines before have made."""


def trees(words: Iterable[str]) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the files that contain one of these words, parsed. The other files cannot use them."""
    words = [*words]
    for path in files():
        text = path.read_text()
        if any(word in text for word in words):
            yield path, ast.parse(text)


def spoken(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def changed(tree: ast.AST) -> Iterator[str]:
    """What is changed by setattr, by its vars or by its __dict__, `self` aside."""
    for node in ast.walk(tree):
        held = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SETS:
            yield ast.unparse(node.args[0])
        elif isinstance(node, ast.Subscript):
            held = None if isinstance(node.ctx, ast.Load) else node.value
        elif isinstance(node, ast.Attribute) and node.attr in ("update", "pop", "setdefault"):
            held = node.value
        if isinstance(held, ast.Call) and ast.unparse(held.func) == "vars":
            yield ast.unparse(held.args[0])
        elif isinstance(held, ast.Attribute) and held.attr == "__dict__":
            yield ast.unparse(held.value)


def test_nothing_looks_into_frames_or_takes_the_place_of_what_others_use() -> None:
    for path, tree in trees([*BREAKING_IN, "unittest"]):
        assert BREAKING_IN.isdisjoint(spoken(tree)), label(path)
        assert not [name for name in imports_of(path) if name.startswith("unittest")], label(path)


def test_only_objects_that_were_just_made_are_changed_past_their_attributes() -> None:
    found = {label(path): {*changed(tree)} for path, tree in trees(("setattr", "vars", "__dict__"))}
    found = {path: names - {"self", "super()"} for path, names in found.items()}
    assert {path: names for path, names in found.items() if names} == MADE_HERE


def test_what_writes_files_sets_attributes_of_its_own_classes_alone() -> None:
    """And `u`, with which a bucket takes what a link has made of it."""
    trees = [ast.parse(path.read_text()) for path in files("source")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    stored = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    own = {n.attr for n in stored if ast.unparse(n.value) == "self"}
    classes = [body for n in nodes if isinstance(n, ast.ClassDef) for body in n.body]
    own |= {ast.unparse(n.target) for n in classes if isinstance(n, ast.AnnAssign)}
    assert {n.attr for n in stored} - own - {"u"} == OF_NEW_OBJECTS


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("vars(rule)['units'] = of", "rule"),
        ("vars(rule).update(units=of)", "rule"),
        ("rule.__dict__['units'] = of", "rule"),
        ("del rule.__dict__['units']", "rule"),
        ("setattr(torch, 'finfo', Info)", "torch"),
        ("object.__setattr__(rule.inner, 'units', of)", "rule.inner"),
    ],
)
def test_a_change_is_found_however_it_is_written(line: str, what: str) -> None:
    assert list(changed(ast.parse(line))) == [what]
