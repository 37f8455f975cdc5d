"""The documentation: every block runs and prints what it says, every name has a page."""

from __future__ import annotations

import ast
import builtins
import contextlib
import doctest
import functools
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import torchzero_clip
from scripts.package_sizes import files
from tests.helpers import KERNELS, at_once
from tests.processes.launch import free_port
from torchzero_clip.core import Description

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^( *)(`{3,}) *([^\n`]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+).+?\1")  # within a line
LINK = re.compile(r"\]\(([^)\s]+)\)")
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
NEEDS = re.compile(r' title="needs (.+?)"')
ELSEWHERE = "several processes"
FEW = 8
EVERY_NAME = "from torchzero_clip import *"  # for the cheat sheet, whose tables use most names
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)

SAYS_SIZE = pytest.mark.filterwarnings("error:the chain has no learning rate:UserWarning")


def pages() -> list[Any]:
    """Pages of frameworks run where those are installed: tests/frameworks/README.md."""
    theirs = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # they warn a lot
    folder = ROOT / "docs" / "frameworks"  # not any folder of that name above the checkout
    return [
        pytest.param(p, id=page_id(p), marks=theirs if p.is_relative_to(folder) else [SAYS_SIZE])
        for p in PAGES
    ]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def expanded(path: Path) -> str:
    """The text of a page with the files that it includes."""
    return SNIPPET.sub(lambda m: (ROOT / m[1]).read_text(), path.read_text())


def prose(path: Path) -> str:
    """The text of a page without its code and its formulas."""
    return re.sub(r"^\$\$$.*?^\$\$$", "", FENCE.sub("", expanded(path)), flags=re.M | re.S)


@contextlib.contextmanager
def interpreter(name: str) -> Iterator[dict[str, Any]]:
    """The names of an interpreter that was just started: there are none."""
    module, known = types.ModuleType(name), dict(Description.registry)
    sys.modules[name] = module
    try:
        yield vars(module)
    finally:
        del sys.modules[name]
        Description.registry.clear()
        Description.registry.update(known)


def run(code: str, where: str, namespace: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, where, "exec", dont_inherit=True), namespace)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


# ---------------------------------------------------------------------- code


class Block(NamedTuple):
    """Code that a reader copies from a page."""

    code: str
    line: int
    needs: set[str]  # what its title says that it needs, beside torch and the library
    program: bool  # a whole file of the examples


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        if "python" in match[3]:
            needs = NEEDS.search(match[3])
            yield Block(
                SNIPPET.sub(lambda m: (ROOT / m[1]).read_text(), match[4]),
                text[: match.start()].count("\n") + 2,
                set(needs[1].split(" and ") if needs else ()),
                SNIPPET.search(match[4]) is not None,
            )


def missing(block: Block) -> set[str]:
    """What is not on this machine; the names of the block are looked up all the same."""
    return {
        need for need in block.needs if need == ELSEWHERE or importlib.util.find_spec(need) is None
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("page", pages())
def test_a_page_runs_as_it_is_pasted_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block after block, into an interpreter in which nothing has happened."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # or deepspeed prints that it found no other
    left: set[str] = set()
    unmade: set[str] = set()  # names of blocks that do not run, because a package is missing
    with interpreter(re.sub(r"\W", "_", page_id(page))) as namespace:
        for block in blocks(page):
            uses, makes = names(symtable.symtable(block.code, "page", "exec"))
            if missing(block) or uses & unmade:
                left |= missing(block)
                if missing(block) != {ELSEWHERE}:
                    unmade |= makes - namespace.keys()
                continue
            unmade -= makes
            # two runs of the tests on one machine may not meet at the port of the page
            code = re.sub(r'(?<=MASTER_PORT=")\d+', lambda m: str(free_port()), block.code)
            said = re.findall(r"^# → ?(.*)$", code, re.MULTILINE)
            printed = run("\n" * (block.line - 1) + code, str(page), namespace)
            assert printed == "\n".join(said), f"{page_id(page)}:{block.line} prints something else"
    if left - {ELSEWHERE}:
        pytest.skip(f"{page_id(page)} ran without what needs {', '.join(sorted(left))}")


@at_once("page", PAGES)
def test_a_page_imports_and_makes_what_it_uses_and_nothing_else(page: Path) -> None:
    """Each name before it is used, also in what cannot run here."""
    known, used, imported = set(dir(builtins)), set(), set()
    for block in blocks(page):
        for statement in ast.parse(block.code).body:
            uses, makes = names(symtable.symtable(ast.unparse(statement), "page", "exec"))
            if not isinstance(statement, ast.Assign | ast.Expr):
                known |= makes  # a loop or a function may use what it makes itself
            assert uses <= known, f"{page_id(page)}:{block.line} has no {uses - known}"
            known |= makes
            used |= uses
            if ast.unparse(statement) == EVERY_NAME:
                known |= set(torchzero_clip.__all__)
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                imported |= makes - {"annotations"}  # of __future__
    assert imported <= used, f"{page_id(page)} imports {imported - used} in vain"


def names(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """The global names that code uses, in its functions too, and those that it makes."""
    top, found = table.get_type() == "module", table.get_symbols()
    uses = {x.get_name() for x in found if x.is_referenced() and (top or x.is_global())}
    makes = {x.get_name() for x in found if top and (x.is_assigned() or x.is_imported())}
    return uses.union(*(names(inner)[0] for inner in table.get_children())), makes


@at_once("page", PAGES)
def test_a_page_says_what_it_needs_and_imports_few_names_at_once(page: Path) -> None:
    """The names are there, too, where the block does not run for want of a framework."""
    said = {"torch", "torchzero_clip", *sys.stdlib_module_names}
    for block in blocks(page):
        where, ours = f"{page_id(page)}:{block.line}", []
        for line in ast.walk(ast.parse(block.code)):
            if isinstance(line, ast.Import | ast.ImportFrom) and ast.unparse(line) != EVERY_NAME:
                module = getattr(line, "module", None) or line.names[0].name
                root = module.partition(".")[0]
                assert root in said or block.needs, f'{where} wants title="needs {root}"'
                said.add(root)
                ours += [each.name for each in line.names if module == "torchzero_clip"]
        assert len(ours) <= FEW or block.program, f"{where} imports {len(ours)} names"
        assert all(hasattr(torchzero_clip, name) for name in ours), where


@at_once("page", PAGES)
def test_blocks_say_what_they_are(page: Path) -> None:
    """A block is python, and runs, or text: nothing is left out by a misspelt language."""
    titled = (NEEDS.sub("", match[3]) for match in FENCE.finditer(page.read_text()))
    assert {kind.strip() for kind in titled} <= {"python", "{ .python }", "text"}


@at_once("page", PAGES)
def test_pages_include_files_that_are_there(page: Path) -> None:
    """A formatter of code that takes such a line for code would leave one that includes nothing."""
    for line in re.findall(r"^.*--8.*$", page.read_text(), re.MULTILINE):
        included = SNIPPET.fullmatch(line)
        assert included, f"{page_id(page)}: {line} includes nothing; its fence is {{ .python }}"
        assert (ROOT / included[1]).is_file(), f"{page_id(page)}: there is no {included[1]}"


def documented() -> list[Any]:
    """Everything in the package with an example in its docstring."""
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        if info.name == KERNELS:
            continue
        module = importlib.import_module(info.name)
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) != info.name or not inspect.getdoc(thing):
                continue
            members = (
                [m for m in vars(thing).values() if callable(m)] if inspect.isclass(thing) else []
            )
            for each in (thing, *members):
                if ">>>" in (getattr(each, "__doc__", None) or ""):
                    found[f"{info.name}.{each.__qualname__}"] = each
    return [
        pytest.param(thing, id=name.removeprefix("torchzero_clip."))
        for name, thing in found.items()
    ]


@SAYS_SIZE
@pytest.mark.parametrize("thing", documented())
def test_every_docstring_example_runs_as_it_is_pasted(thing: Any) -> None:
    """With the answers of an interpreter in which nothing has happened, as doctest has it."""
    said: list[str] = []
    with interpreter("docstring") as namespace:
        text = inspect.getdoc(thing) or ""
        example = doctest.DocTestParser().get_doctest(text, namespace, thing.__name__, None, 0)
        doctest.DocTestRunner(verbose=False).run(example, out=said.append, clear_globs=False)
    assert not said, "".join(said)


def test_the_copy_button_leaves_prompts_and_answers_out() -> None:
    """What the style of the pages hides while something is copied, taken from all examples."""
    console = pytest.importorskip("pygments.lexers").PythonConsoleLexer()
    short = pytest.importorskip("pygments.token").STANDARD_TYPES
    style = (ROOT / "docs" / "assets" / "extra.css").read_text()
    (hidden,) = re.findall(r"\[data-md-copying\] :is\((.*?)\) {\s+display: none;", style)
    for param in documented():
        (thing,) = param.values
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")
        shown = "".join(
            f">>> {example.source}".replace("\n", "\n... ")[:-4] + example.want
            for example in examples
        )
        tokens = list(console.get_tokens(shown))
        copied = "".join(
            text for kind, text in tokens if f".{short[kind]}" not in hidden.split(", ")
        )
        assert ast.dump(ast.parse(copied)) == ast.dump(
            ast.parse("".join(example.source for example in examples))
        ), param.id


@pytest.fixture(scope="module")
def package() -> Any:
    """The package as griffe shows it to mkdocstrings."""
    griffe = pytest.importorskip("griffe", reason="griffe is not installed: it is in the extra dev")
    extensions = griffe.load_extensions(ROOT / "docs" / "_hooks" / "fields.py")
    return griffe.load("torchzero_clip", search_paths=[ROOT], extensions=extensions)


@pytest.mark.slow
def test_a_function_in_a_file_of_its_own_name_has_its_arguments_on_its_page(package: Any) -> None:
    for name in torchzero_clip.__all__:
        if (
            inspect.isfunction(getattr(torchzero_clip, name))
            and f"torchzero_clip.{name}" in public()
        ):
            assert package[name].is_function, name


@pytest.mark.slow
def test_what_a_page_lists_of_a_class_is_there_and_says_what_it_does(package: Any) -> None:
    """mkdocstrings leaves out what it does not find, without a word."""
    page = (ROOT / "docs" / "api.md").read_text()
    blocks = [block.split("\n\n")[0] for block in page.split("::: torchzero_clip.")[1:]]
    listed = {block.split()[0]: re.findall(r"members: \[(.*?)\]", block) for block in blocks}
    listed = {name: row[0].split(", ") for name, row in listed.items() if row}
    assert len(listed) > 5
    for name, members in listed.items():
        found = package[name].all_members
        assert [x for x in members if x not in found] == [], name
        assert [x for x in members if not (found[x].docstring or found[x].inherited)] == [], name


def test_write_your_own_is_the_example() -> None:
    """The classes in the README and the guide are those of examples/write_your_own.py."""
    example = (ROOT / "examples" / "write_your_own.py").read_text()
    for page in (ROOT / "README.md", ROOT / "docs" / "write_your_own.md"):
        classes = re.findall(
            r"^class (?:SlowBoost|ClipToAverage)\(.*?(?=^\S|^```)", page.read_text(), re.M | re.S
        )
        assert classes
        for text in classes:
            assert text.rstrip() in example


def test_write_your_own_takes_nine_lines() -> None:
    page = (ROOT / "README.md").read_text()
    (text,) = re.findall(r"^class SlowBoost\(.*?(?=^\S|^```)", page, re.M | re.S)
    code = re.sub(r'^ *""".*"""$', "", text, flags=re.M)
    assert len([line for line in code.splitlines() if line.strip()]) <= 9


def test_the_loop_on_the_page_is_the_one_that_runs() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    (block,) = [m[4] for m in FENCE.finditer(page) if "for link in self.links" in m[4]]
    assert textwrap.indent(block, " " * 8) in inspect.getsource(torchzero_clip.Modular._through)


def test_the_guide_lists_the_verbs_of_units() -> None:
    page = (ROOT / "docs" / "write_units.md").read_text()
    listed = re.findall(r"`units\.(\w+)\(", page)
    (row,) = re.findall(
        r"^::: torchzero_clip\.Units\n.*?members: \[(.*?)\]$",
        (ROOT / "docs" / "api.md").read_text(),
        re.M | re.S,
    )
    assert set(row.split(", ")) <= set(listed)
    assert all(callable(getattr(torchzero_clip.Units, name)) for name in listed)


def test_the_guide_lists_what_a_tensor_list_can_do() -> None:
    page = (ROOT / "docs" / "write_your_own.md").read_text()
    (part,) = re.findall(r"^### What a TensorList can do\n(.*?)^## ", page, re.M | re.S)
    rows = re.findall(r"^\| (\w.*?) \| (.*) \|$", part, re.M)
    listed = {name for _, names in rows for name in re.findall(r"`(\w+)`", names)}
    (both,) = [names for kind, names in rows if "with an underscore" in kind]
    listed |= {name + "_" for name in re.findall(r"`(\w+)`", both)}
    methods = {
        name
        for name, value in vars(torchzero_clip.TensorList).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert listed == methods
    (row,) = re.findall(
        r"^::: torchzero_clip\.TensorList\n.*?members: \[(.*?)\]$",
        (ROOT / "docs" / "api.md").read_text(),
        re.M | re.S,
    )
    assert set(row.split(", ")) == methods


def test_the_page_about_the_way_of_a_gradient_names_the_loop() -> None:
    page = (ROOT / "docs" / "inside.md").read_text()
    (name,) = re.findall(r"the loop over the links \| `ChainRunner\.(\w+)`", page)
    source = inspect.getsource(getattr(torchzero_clip.Modular, name))
    assert "for link in self.links:\n" in source
    assert "send(link, buckets)" in source


def test_the_readme_starts_from_nothing() -> None:
    """The snippet with a training loop runs as it stands."""
    page = (ROOT / "README.md").read_text()
    first = next(m[4] for m in FENCE.finditer(page) if "for step in" in m[4])
    run(first, "README.md", {})


# ---------------------------------------------------------------------- names and links


def public() -> set[str]:
    """What a page must refer to; some names are those of modules as well."""
    modules = {"attach", "optimizer_class"}
    names = {f"{name}.{name}" if name in modules else name for name in torchzero_clip.__all__}
    return {f"torchzero_clip.{name}" for name in names}


def test_every_public_name_has_a_page() -> None:
    shown = {name for page in PAGES for name in REFERENCE.findall(page.read_text())}
    missing = public() - shown
    assert not missing, f"give these a page, or a place in docs/api.md: {sorted(missing)}"


def test_every_function_of_spec_is_on_the_page() -> None:
    """Those of a file together, in its order; what rules compute with is no rule."""
    listed = re.findall(r"^        - (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    found = []
    for path in files("spec"):
        names = re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", path.read_text(), re.MULTILINE)
        if path.stem != "arithmetic":
            assert [name for name in listed if name in names] == names
            found += names
    assert sorted(listed) == sorted(found)
    assert set(found) < set(torchzero_clip.spec.__all__)


def test_pages_document_nothing_that_is_gone() -> None:
    shown = {name for page in PAGES for name in REFERENCE.findall(page.read_text())}
    assert shown <= public()


def slug(heading: str) -> str:
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[| \{ .*\}$", "", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@functools.cache  # many links lead to the same page
def anchors(page: Path) -> set[str]:
    text = prose(page)
    return {slug(h) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)} | set(
        REFERENCE.findall(text)
    )


@at_once("page", PAGES)
def test_a_page_links_to_the_files_that_it_includes(page: Path) -> None:
    """A code host shows the line that includes a file instead of the file."""
    links = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    for file in SNIPPET.findall(page.read_text()):
        assert ROOT / file in links, f"{page_id(page)} does not link to {file}"


@at_once("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page_id(page)} links to {link}"
        if anchor and target.suffix == ".md":
            found = anchors(target)
            deeper = any(anchor.startswith(name + ".") for name in found)
            assert anchor in found or deeper, f"{page_id(page)} links to {link}"
