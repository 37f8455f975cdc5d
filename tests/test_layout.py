"""Which way the imports go, and that every public name is listed and documented."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchzero_clip as tz

PACKAGE = Path(tz.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted(p for p in (PACKAGE / "modules").rglob("*.py") if p.name != "__init__.py")
FOLDERS = sorted({page.parent.name for page in PAGES})
LONGEST = 120


def label(path):
    return path.relative_to(PACKAGE).as_posix()


def imports(source, inside):
    """The full name of everything a file imports, functions and TYPE_CHECKING included.

    `inside` is the package the file lies in, which relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = inside.split(".")
            base = folders[: len(folders) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def imports_of(path):
    inside = ".".join([PACKAGE.name, *path.parent.relative_to(PACKAGE).parts])
    return set(imports(path.read_text(), inside))


def own(path):
    """What a file imports from this library, without the library's name."""
    return {n.partition(".")[2] for n in imports_of(path) if n.split(".")[0] == PACKAGE.name}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch.nn"}),
        ("from torch import Tensor, nn", {"torch.Tensor", "torch.nn"}),
        ("from . import x", {"torchzero_clip.core.x"}),
        ("from ..modules.flow import y", {"torchzero_clip.modules.flow.y"}),
        ("def f():\n    import numpy", {"numpy"}),
        ("if TYPE_CHECKING:\n    from numpy import ndarray", {"numpy.ndarray"}),
    ],
)
def test_the_test_finds_every_kind_of_import(source, found):
    assert set(imports(source, "torchzero_clip.core")) == found


PLOTS = ("_plot.py", "recorder.py")


@pytest.mark.parametrize("path", FILES, ids=label)
def test_only_torch_typing_extensions_and_the_standard_library_are_imported(path):
    allowed = {"torch", "typing_extensions", PACKAGE.name} | sys.stdlib_module_names
    allowed |= {"matplotlib"} if path.name in PLOTS else set()  # an extra; inside functions
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=label)
def test_core_imports_core_alone(path):
    assert {name for name in own(path) if not name.startswith("core.")} == set()


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_a_module_imports_core_and_its_own_folder(path):
    folder = path.parent.name
    others = {n for n in own(path) if not n.startswith(("core.", f"modules.{folder}."))}
    assert others == set()


def test_core_names_no_rule():
    core = importlib.import_module("torchzero_clip.core")
    rules = set(tz.__all__) - set(core.__all__)
    for path in sorted((PACKAGE / "core").glob("*.py")):
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert names & rules == set()


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_a_module_page_is_at_most_120_lines(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_every_page_belongs_to_one_of_the_folders():
    assert FOLDERS == ["adaptive", "clipping", "descent", "flow"]
    assert all(page.parent.parent == PACKAGE / "modules" for page in PAGES)


# --- public names


def public(module):
    """The names that a module shows, submodules that were merely imported aside."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


PACKAGES = [
    "torchzero_clip.core",
    *[f"torchzero_clip.modules.{folder}" for folder in FOLDERS],
]


@pytest.mark.parametrize("name", ["torchzero_clip", *PACKAGES])
def test_all_lists_what_can_be_seen_and_nothing_twice(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) - {"spec"} == public(module)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_rule_is_public(folder):
    module = importlib.import_module(f"torchzero_clip.modules.{folder}")
    assert set(module.__all__) <= set(tz.__all__)
    for info in pkgutil.iter_modules(module.__path__):
        page = importlib.import_module(f"{module.__name__}.{info.name}")
        rules = {
            name
            for name, value in vars(page).items()
            if inspect.isclass(value)
            and value.__module__ == page.__name__
            and not name.startswith("_")
        }
        assert rules <= set(tz.__all__)


def docstring(name):
    """What stands in the source: a dataclass without a docstring is given its signature."""
    value = getattr(tz, name)
    value = None if hasattr(value, "__origin__") else value  # an alias, not the type behind it
    if inspect.ismodule(value):
        return value.__doc__
    if isinstance(value, type) or inspect.isfunction(value):
        return ast.get_docstring(ast.parse(inspect.getsource(value)).body[0]) or ""
    for path in FILES:  # such as Live: the string below it
        for node, after in itertools.pairwise(ast.parse(path.read_text()).body):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [getattr(target, "id", None) for target in targets]
            if name in names and isinstance(getattr(after, "value", None), ast.Constant):
                return after.value.value
    return ""


@pytest.mark.parametrize("name", tz.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    assert len(docstring(name).split()) >= 3


RULES = [
    name
    for name in tz.__all__
    if hasattr(getattr(tz, name), "__dataclass_fields__")
    and getattr(tz, name).__module__.startswith("torchzero_clip.modules")
]


@pytest.mark.parametrize("name", RULES)
def test_every_argument_of_a_rule_is_documented(name):
    arguments = inspect.signature(getattr(tz, name)).parameters
    assert [
        a for a in arguments if a not in ("target", "name") and f"{a}:" not in docstring(name)
    ] == []


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


def test_importing_the_library_imports_torch_and_nothing_else():
    """The files above could still reach others through torch."""
    loaded = []
    for what in ("torch, torch.distributed.tensor", "torchzero_clip"):
        code = f"import sys, {what}; print(*(m.split('.')[0] for m in sys.modules))"
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
        loaded.append(set(done.stdout.split()))
    allowed = {"torch", "typing_extensions", PACKAGE.name} | sys.stdlib_module_names
    assert PACKAGE.name in loaded[1]
    assert loaded[1] - loaded[0] <= allowed
