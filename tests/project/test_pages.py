"""What a page of modules/ says is the formula of its rule, and nothing of how it is computed."""

import ast

import pytest

from scripts import package_sizes
from scripts.package_sizes import label
from tests.helpers import at_once

PAGES = [path for path in package_sizes.files("modules") if path.name != "__init__.py"]
ENGINE = {"engine", "engines", "session", "sessions", "opener", "recorder", "perhaps", "workspace"}
VERBS = {"entrywise", "operand", "beside", "write", "settle", "state_dtype"}
GUARDS = ("flow/guard.py", "flow/skip_large.py", "flow/skip_spike.py", "flow/step_guard.py")


def said(source):
    """The words of engines that a source imports, names, calls or reads; arguments of its own that
    have such a name, as `self.state_dtype`, aside.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) != "self.state_dtype":
            yield from {node.attr} & (ENGINE | VERBS)
            if node.attr == "hold" and ast.unparse(node.value).endswith("skip"):
                yield "skip.hold"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = [*getattr(node, "module", "").split(".")]
            names = [*module, *[part for x in node.names for part in x.name.split(".")]]
            yield from {name.lower() for name in names} & (ENGINE | VERBS)
        elif isinstance(node, ast.Name) and node.id != "state_dtype":
            yield from {node.id.lower()} & (ENGINE | VERBS)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("state_dtype", "getattr"):
            named = [x.value for x in node.args if isinstance(x, ast.Constant)]
            yield from {ast.unparse(node.func), *map(str, named)} & (ENGINE | VERBS)


@at_once("path", PAGES)
def test_a_page_names_no_engine_and_none_of_its_verbs(path):
    found = set(said(path.read_text()))
    found -= {"skip.hold"} if label(path).endswith(GUARDS) else set()
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("u = bucket.u.to(bucket.state_dtype)", "state_dtype"),
        ("state_dtype(param)", "state_dtype"),
        ("from torchzero_clip.core.state import state_dtype", "state_dtype"),
        ("bucket.u = bucket.entrywise(TensorList.sub_, u, x=bucket.params)", "entrywise"),
        ("times = bucket.beside", "beside"),
        ("getattr(step, 'engine', None)", "engine"),
        ("bucket.step.skip.hold(held)", "skip.hold"),
        ("from torchzero_clip.core.engine import Session", "session"),
        ("def f(recorder): return recorder", "recorder"),
    ],
)
def test_such_a_word_is_found_wherever_code_has_it(source, word):
    assert word in set(said(source))


def test_prose_arguments_and_other_words_are_none():
    source = '"""It may write an operand."""\nclass A:\n    def f(self, state_dtype=None):\n'
    source += "        self.state_dtype = state_dtype\n        bucket.step.skip.read('why')\n"
    assert set(said(source)) == set()
