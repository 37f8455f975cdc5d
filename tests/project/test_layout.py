"""Which way the imports go, and that every public name is listed and documented."""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import torchzero_clip as tz
from scripts import package_sizes
from scripts.package_sizes import imports, imports_of, label
from tests.helpers import at_once
from tests.processes.launch import python

PACKAGE = Path(tz.__file__).parent
FILES = package_sizes.files()
PAGES = [path for path in package_sizes.files("modules") if path.name != "__init__.py"]
FOLDERS = sorted({page.parent.name for page in PAGES})


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


PLOTS = ("plot.py", "recorder.py")


@at_once("path", FILES)
def test_only_torch_typing_extensions_and_the_standard_library_are_imported(path):
    allowed = {"torch", "typing_extensions", PACKAGE.name} | sys.stdlib_module_names
    allowed |= {"matplotlib"} if path.name in PLOTS else set()  # an extra; inside functions
    allowed |= (
        {"triton"} if path.name == "triton_include.py" else set()
    )  # imported where it is installed
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed


# --- which way the imports go


def test_a_package_imports_only_the_packages_below_it():
    """Rules import core and their own folder; core imports torch; every file has a package."""
    assert {label(p): wrong for p in FILES if (wrong := package_sizes.outside(p))} == {}
    assert {package_sizes.package_of(path) for path in FILES} == set(package_sizes.PACKAGES)


def test_each_file_outside_the_packages_has_one_by_its_name(monkeypatch, tmp_path):
    assert {
        path.name for path in FILES if path.parent == PACKAGE
    } == package_sizes.PACKAGE_OF_FILE.keys()
    monkeypatch.setattr(package_sizes, "PACKAGE", tmp_path)
    for stray in ("stray.py", "stray/stray.py"):
        with pytest.raises(LookupError, match=f"{stray} has no package"):
            package_sizes.package_of(tmp_path / stray)


def test_no_two_files_import_each_other_nor_through_others():
    assert package_sizes.circles(package_sizes.arrows()) == []


def test_core_and_rules_know_no_class_of_an_engine():
    assert {"Eager", "Compiled"} <= package_sizes.engine_classes()
    paths = package_sizes.files("core", "modules")
    assert {label(p): names for p in paths if (names := package_sizes.engine_names(p))} == {}


def members(path, name):
    """What a class has by its methods, its annotations and what it sets on itself."""
    tree = ast.parse((PACKAGE / path).read_text())
    (node,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    found = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
    found |= {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
    set_here = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return found | {n.attr for n in set_here if ast.unparse(n) == f"self.{n.attr}"}


ENGINES = [("engines/eager.py", "Eager"), ("engines/compiled/compiled.py", "Compiled")]
INSIDE_AN_ENGINE = set().union(*[members(*engine) for engine in ENGINES])
INSIDE_AN_ENGINE |= {"watch", "backend", "buffers"}
INSIDE_AN_ENGINE -= members("core/engine.py", "Engine") | {"__init__"}


def inside_engines(source):
    """What a source uses of an engine beyond the interface, and where it asks which one it is."""
    if not re.search("engine|Compiled|Eager", source):
        return
    for node in ast.walk(ast.parse(source)):
        inside = isinstance(node, ast.Attribute) and node.attr in INSIDE_AN_ENGINE
        if inside and ast.unparse(node.value).endswith("engine"):
            yield node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            of, name = map(ast.unparse, node.args[:2])
            yield from {name.strip("'")} & INSIDE_AN_ENGINE if of.endswith("engine") else ()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            yield from asked & {"Compiled", "Eager"}


def test_outside_of_engines_nothing_but_the_interface_of_one_is_used():
    outside = [path for path in FILES if not label(path).startswith("engines/")]
    assert {label(p): used for p in outside if (used := [*inside_engines(p.read_text())])} == {}
    asked = "isinstance(opt.engine, (Compiled, Eager))\nopt.engine.watch = twin.engine.backend\n"
    asked += "getattr(opt.engine, 'replays', None)\nopt.engine.twin()"
    assert sorted(inside_engines(asked)) == ["Compiled", "Eager", "backend", "replays", "watch"]


def test_an_imported_name_belongs_to_the_file_that_defines_it():
    """Packages that only hand names on are passed through."""
    found = {
        "torchzero_clip.core.TensorList": "core/tensorlist.py",
        "torchzero_clip.core.bucket.Bucket": "core/bucket.py",
        "torchzero_clip.ClipNorm": "modules/clipping/clip_norm.py",
        "torchzero_clip.modules.descent.Adam": "modules/descent/adam.py",
        "torchzero_clip.core.norms": "core/norms/__init__.py",
        "torchzero_clip.spec.norm": "spec/plain_numbers.py",
        "torchzero_clip": "__init__.py",
    }
    assert {name: label(package_sizes.home(name)) for name in found} == found
    assert package_sizes.home("torch.nn.Module") is None


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("core/bucket.py", "engines/eager.py"),
        ("core/chain.py", "spec/growth.py"),
        ("engines/eager.py", "optimizer/modular.py"),
        ("optimizer/modular.py", "attach/handle.py"),
        ("modules/descent/lr.py", "engines/eager.py"),
        ("modules/descent/lr.py", "modules/flow/when.py"),
        ("published/classic.py", "optimizer/modular.py"),
        ("engines/compiled/printers/cpp.py", "engines/compiled/lists/tape.py"),
        ("engines/compiled/lists/runner.py", "engines/compiled/replay/step_recorder.py"),
        ("engines/compiled/replay/replays.py", "engines/compiled/lists/tape.py"),
        ("optimizer/explain.py", "study/trace.py"),
        ("attach/handle.py", "study/lab/server.py"),
        ("study/recorder.py", "audit/step_audit.py"),
        ("audit/ledger.py", "study/recorder.py"),
        ("releasing/released.py", "attach/handle.py"),
        ("grads.py", "releasing/released.py"),
        ("grads.py", "spec/growth.py"),
    ],
)
def test_arrows_that_go_the_wrong_way_are_found(path, to, monkeypatch):
    graph = {PACKAGE / path: {PACKAGE / to, PACKAGE / "core" / "link.py"}}
    monkeypatch.setattr(package_sizes, "arrows", lambda: graph)
    assert package_sizes.outside(PACKAGE / path) == {to}


def test_circles_are_found_directly_and_through_others():
    a, b, c, d = map(Path, "abcd")
    assert package_sizes.circles({a: {b}, b: {a}, c: {a}}) == [[a, b]]
    assert package_sizes.circles({a: {b}, b: {c}, c: {a}, d: {a}}) == [[a, b, c]]
    assert package_sizes.circles({a: {b, c}, b: {c}, c: set()}) == []


def test_no_two_files_have_one_name():
    names = [path.name for path in FILES if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_core_names_no_rule():
    core = importlib.import_module("torchzero_clip.core")
    rules = {n for n in tz.__all__ if inspect.isclass(getattr(tz, n))} - {*core.__all__, "Within"}
    for path in sorted((PACKAGE / "core").glob("*.py")):
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert names & rules == set()


# --- how large the packages are


def too_many(counts):
    return [str(count) for count in counts if not count.holds]


@pytest.fixture(scope="module")
def sizes():
    return list(package_sizes.sizes())


def test_every_limit_is_of_a_package_that_is_counted(sizes):
    assert package_sizes.MOST_NODES.keys() == package_sizes.PACKAGES.keys() - {"modules"}
    assert all([count.value for count in sizes])


def test_a_count_of_nothing_is_an_error():
    assert too_many([package_sizes.Count("syntax nodes of core", 0, 10)])
    assert too_many([package_sizes.Count("syntax nodes of core", 11, 10)])
    assert too_many([package_sizes.Count("syntax nodes of core", 10, 10)]) == []


def test_the_tree_that_is_measured_is_its_own(tmp_path):
    """Not one that is installed: of that no function would be counted, and all be well."""
    (tmp_path / "torchzero_clip.py").write_text("raise ImportError('another tree')")
    script = str(Path(package_sizes.__file__))
    code = (
        f"import runpy; runpy.run_path({script!r}); import torchzero_clip as t; print(t.__file__)"
    )
    ended = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert str(PACKAGE) in str(ended)


def test_each_package_stays_within_its_limit(sizes):
    assert too_many(sizes) == []


def test_a_rule_has_one_short_page():
    assert too_many(package_sizes.pages()) == []


def test_code_lines_are_those_without_docstrings_comments_and_blanks():
    source = '''"""A page.

    With more to say.
    """

# why
x = {  # two lines of code, and
    1: """a string
that is no docstring""",

}
"""What x is."""


def f():
    """A docstring."""
    return x
'''
    assert package_sizes.code_lines(source) == 6


def test_the_way_of_a_step_passes_through_the_links_of_the_chain():
    way = package_sizes.entered(package_sizes.headline())
    assert {"core/norm_rule.py", "core/decision.py", "modules/clipping/clip_norm.py"} <= way.keys()


def test_syntax_nodes_count_neither_docstrings_nor_lines():
    plain = "def f():\n    return x"
    documented = '"""A page."""\n\ndef f():\n    """A docstring."""\n\n    return x'
    assert package_sizes.syntax_nodes(documented) == package_sizes.syntax_nodes(plain)
    packed, unpacked = "a, b = 1, 2", "a = 1\nb = 2"
    assert package_sizes.syntax_nodes(packed) >= package_sizes.syntax_nodes(unpacked)


def test_lambdas_and_comprehensions_count_as_part_of_their_function():
    path = str(PACKAGE / "core" / "description.py")
    names = [name for _, _, name in package_sizes.functions(path)]
    assert {"_check_after_init", "_check_after_init.checked"} <= set(names)
    for first, last, name in package_sizes.functions(path):
        assert package_sizes.enclosing(path, first) == name
        assert package_sizes.enclosing(path, last).startswith(name)
    assert package_sizes.enclosing(path, 1) == "<module>"


def types(path):
    """What a file calls a type: its classes, and at its top level aliases, with their text."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"a class of {label(path)}"
    for node in tree.body if path.parent.name != "spec" else ():  # there numbers stand for tensors
        if isinstance(node, (ast.AnnAssign, ast.Assign)):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and re.fullmatch("[A-Z].*[a-z].*", target.id):
                yield target.id, ast.unparse(node.value)


def meanings(paths):
    found = {}
    for name, meaning in itertools.chain(*map(types, paths)):
        found.setdefault(name, set()).add(meaning)
    return found


def test_a_name_of_a_type_has_one_meaning_in_the_whole_package():
    several = {name: what for name, what in meanings(FILES).items() if len(what) > 1}
    assert several == {}


def test_names_of_types_are_found_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(package_sizes, "PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("def f():\n    class Trace: ...\nMOST = 3\nTexts = list[str]")
    (tmp_path / "b.py").write_text("class Trace: ...\nMOST = 4\nTexts = list[str]\n")
    found = meanings(sorted(tmp_path.iterdir()))
    assert {name: len(what) for name, what in found.items()} == {"Trace": 2, "Texts": 1}


def test_every_page_belongs_to_one_of_the_folders():
    assert FOLDERS == ["adaptive", "averages", "clipping", "descent", "flow", "matrices"]
    assert all(page.parent.parent == PACKAGE / "modules" for page in PAGES)


# --- public names


def public(module):
    """The names that a module shows, submodules that were merely imported aside."""
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    }


PACKAGES = [
    "torchzero_clip.core",
    *[f"torchzero_clip.modules.{folder}" for folder in FOLDERS],
]


@pytest.mark.parametrize("name", ["torchzero_clip", *PACKAGES])
def test_all_lists_what_can_be_seen_and_nothing_twice(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) - {"compat", "spec"} == public(module)


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


@functools.cache
def docstring(name):
    """What stands in the source: a dataclass without a docstring is given its signature."""
    value = getattr(tz, name)
    value = None if hasattr(value, "__origin__") else value  # an alias, not the type behind it
    if inspect.ismodule(value):
        return value.__doc__
    if isinstance(value, type) or inspect.isfunction(value):
        return ast.get_docstring(ast.parse(inspect.getsource(value)).body[0]) or ""
    for path in FILES:  # such as Live: the string below it
        source = path.read_text()
        if not re.search(rf"^{name}\b", source, re.MULTILINE):
            continue
        for node, after in itertools.pairwise(ast.parse(source).body):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [getattr(target, "id", None) for target in targets]
            if name in names and isinstance(getattr(after, "value", None), ast.Constant):
                return after.value.value
    return ""


@at_once("name", tz.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name):
    assert len(docstring(name).split()) >= 3


RULES = [
    name
    for name in tz.__all__
    if hasattr(getattr(tz, name), "__dataclass_fields__")
    and getattr(tz, name).__module__.startswith("torchzero_clip.modules")
]


@at_once("name", RULES)
def test_every_argument_of_a_rule_is_documented(name):
    arguments = inspect.signature(getattr(tz, name)).parameters.keys()
    own = arguments - {"target", "name", "state_dtype"}  # those of every rule are on Transform
    assert [a for a in own if f"{a}:" not in docstring(name)] == []


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.xdist_group("groups")
def test_workers_know_which_tests_belong_together(request):
    """With pytest 9.2 xdist 3.8 forgets: what a group shares is then made by every worker."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@groups")
