"""What the documentation claims of other people's methods has a mark, and each mark a test."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

import torchzero_clip
from tests.helpers import KERNELS, ROOT
from tests.identities.identity import Identity, load
from tests.identities.inputs import STEPS
from torchzero_clip.published import NAMES, links_of

MARK = re.compile(r"\{identity: (\w+)\}")
HOOK = ROOT / "docs" / "_hooks" / "identities.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def docstrings() -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its text, for everything in the package."""
    for info in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        if info.name.endswith("__main__") or info.name == KERNELS:
            continue
        module = importlib.import_module(info.name)
        yield info.name, module.__doc__ or ""
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) == info.name:
                yield f"{info.name}.{name}", inspect.getdoc(thing) or ""


def texts() -> list[tuple[str, str]]:
    pages = [(p.relative_to(ROOT).as_posix(), p.read_text()) for p in PAGES]
    return [*pages, *docstrings()]


def lists() -> Any:
    """The hook that fills the pages of names and identities."""
    tool("mkdocs")
    source = importlib.util.spec_from_file_location("lists", HOOK)
    assert source is not None
    assert source.loader is not None
    hook = importlib.util.module_from_spec(source)
    source.loader.exec_module(hook)
    return hook


def test_the_page_of_names_has_every_name_with_its_links_and_its_identity() -> None:
    page = lists().on_page_markdown((ROOT / "docs" / "named.md").read_text())
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert parts.keys() == NAMES.keys()
    for name, part in parts.items():
        assert f'<a data-identity="{name}"></a>' in part
        for link, formula in links_of(NAMES[name]()):
            assert f"| `{link!r}` | `` {formula} `` |" in part


def test_the_table_of_methods_has_a_row_for_every_name() -> None:
    """Its links, the bytes of state for each number, whose code holds it, and in how many ways."""
    page = lists().on_page_markdown((ROOT / "docs" / "named.md").read_text())
    rows = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (.+) \| (\S+) \| (.+) \| (.+) <a .*$", page, re.M)
    table = {name: rest for name, *rest in rows}
    assert table.keys() == NAMES.keys()
    for name, (links, _, about, held) in table.items():
        assert links == ", ".join(f"`{type(link).__name__}`" for link, _ in links_of(NAMES[name]()))
        assert about in " ".join((inspect.getdoc(NAMES[name]) or "").split())
        identity = load()[name]
        source, _, scheduled = held.partition("; ")
        version = f"torch {torch.__version__.partition('+')[0]}, " if identity.in_torch else ""
        assert (version + identity.source).startswith(source)
        assert re.search(r" (\d+(\.\w+)+|[0-9a-f]{7})(,|$)", source), f"{source} has no version"
        assert scheduled == f"{len(moving(identity))} options scheduled"
    scheduled = {"adamw": 4, "lion": 3, "adafactor": 5, "schedule_free_adamw": 6}
    assert {name: len(moving(load()[name])) for name in scheduled} == scheduled
    numbers = {"sgd": "0", "lion": "4", "adamw": "8", "ademamix": "12", "adan": "16"}
    assert {name: table[name][1] for name in numbers} == numbers


def moving(identity: Identity) -> set[str]:
    """The options of the official code that are not the same in all steps of a group."""
    groups = [[identity.options(x, step) for step in range(STEPS)] for x in "ab"]
    return {name for rows in groups for name in rows[0] if len({str(x[name]) for x in rows}) > 1}


def test_the_page_of_identities_has_every_claim_with_its_test() -> None:
    page = lists().on_page_markdown((ROOT / "docs" / "identities.md").read_text())
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert parts.keys() == load().keys()
    for name, identity in load().items():
        assert identity.claim in parts[name]
        assert identity.source in parts[name]
        assert f"def {identity.theirs.__name__}(" in parts[name]


def test_every_mark_has_its_test() -> None:
    known = load()
    marks = {(where, name) for where, text in texts() for name in MARK.findall(text)}
    assert marks
    assert {mark for mark in marks if mark[1] not in known} == set()


def test_every_optimizer_of_torch_has_its_row_and_its_identity() -> None:
    """LBFGS and SparseAdam have a row that says what to do."""
    theirs = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls)}
    theirs -= {"Optimizer"}
    page = (ROOT / "docs" / "coming_from.md").read_text()
    assert theirs <= set(re.findall(r"`torch\.optim\.(\w+)", page))
    held = {it.source.removeprefix("torch.optim.") for it in load().values() if it.in_torch}
    assert theirs - held == {"LBFGS", "SparseAdam"}


def tool(name: str) -> Any:
    """A module of what builds the documentation, which the environments of peers lack."""
    return pytest.importorskip(name, reason="mkdocs is not installed: it is in the extra dev")


def site(folder: Path, text: str) -> str:
    """The page that the hook makes of a text, in a strict build."""
    build = tool("mkdocs.commands.build").build
    load_config = tool("mkdocs.config").load_config
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(text)
    (folder / "mkdocs.yml").write_text("site_name: claims")
    build(load_config(str(folder / "mkdocs.yml"), plugins=[], hooks=[str(HOOK)], strict=True))
    return (folder / "site" / "index.html").read_text()


def test_a_claim_leads_to_its_test(tmp_path: Path) -> None:
    page = site(tmp_path, "`Adam`, then `WeightDecay`, is AdamW {identity: adamw}.")
    (link,) = re.findall(r'<a class="identity" href="(.+?)" title="(.+?)">', page)
    assert link == ("identities/#adamw", "tests/identities/methods/classic.py::adamw")


def test_a_claim_without_a_test_fails_the_build(tmp_path: Path) -> None:
    abort = tool("mkdocs.exceptions").Abort
    with TestCase().assertLogs("mkdocs") as log, pytest.raises(abort):
        site(tmp_path, "`Adam`, then `Sign`, is nobody {identity: nobody}.")
    said = "{identity: nobody} has no test: add one to tests/identities/methods"
    assert said in "\n".join(log.output)


METHODS = "AdamW|LAMB|LARS|Lion|Signum|C-AdamW|Adafactor|StableAdamW|SPAM|AMSGrad|Nesterov"
SAYS = r"\b(?:is|as in|that of|makes|gives|are)(?: \S+)? `?"
THEIRS = rf"torch\.optim\.(?!Opt)\w+|torch\.nn\.utils\.\w+|(?:{METHODS})\b"
CLAIM = re.compile(rf"{SAYS}(?:{THEIRS})|gradient centralization of|rule of the paper|paper's rule")


def unmarked(text: str) -> Iterator[str]:
    """Sentences that equate something with a method, and lead to no test."""
    prose = re.sub(r"^ *```.*?^ *```|^:::.*?$|^ +>>> .*$", "", text, flags=re.M | re.S)
    for sentence in re.split(r"(?<=[.:;|])\s|\n\n", MARK.sub("✓", prose)):
        plain = " ".join(sentence.split())
        if CLAIM.search(plain) and not re.search(r"✓|\bnot\b|\(tests/", plain):
            yield plain


@pytest.mark.parametrize(
    "sentence",
    [
        "After Adam it is LAMB.",
        "The running sum, exactly as in `torch.optim.SGD`.",
        "Between the two it is decoupled, as in AdamW.",
        "`dim` is that of torch. It is what\n`torch.nn.utils.clip_grad_norm_` does.",
    ],
)
def test_a_claim_without_a_mark_is_found(sentence: str) -> None:
    assert list(unmarked(sentence))
    marked = sentence.rstrip(".") + " {identity: it}."
    assert not list(unmarked(marked))


def test_every_claim_has_a_mark() -> None:
    found = {(where, claim) for where, text in texts() for claim in unmarked(text)}
    assert found == set()
