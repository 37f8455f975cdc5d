"""What the documentation claims of other people's methods has a mark, and each mark a test."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import torchzero_clip
from tests.helpers import ROOT
from tests.identities.identity import load

MARK = re.compile(r"\{identity: (\w+)\}")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def docstrings() -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its text, for everything in the package."""
    for info in pkgutil.walk_packages(torchzero_clip.__path__, "torchzero_clip."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        yield info.name, module.__doc__ or ""
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) == info.name:
                yield f"{info.name}.{name}", inspect.getdoc(thing) or ""


def texts() -> list[tuple[str, str]]:
    pages = [(p.relative_to(ROOT).as_posix(), p.read_text()) for p in PAGES]
    return [*pages, *docstrings()]


def test_every_mark_has_its_test() -> None:
    known = load()
    marks = {(where, name) for where, text in texts() for name in MARK.findall(text)}
    assert marks
    assert {mark for mark in marks if mark[1] not in known} == set()


def site(folder: Path, text: str) -> str:
    """The page that the hook makes of a text, in a strict build."""
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(text)
    (folder / "mkdocs.yml").write_text("site_name: claims")
    hook = str(ROOT / "docs" / "_hooks" / "identities.py")
    build(load_config(str(folder / "mkdocs.yml"), plugins=[], hooks=[hook], strict=True))
    return (folder / "site" / "index.html").read_text()


def test_a_claim_leads_to_its_test(tmp_path: Path) -> None:
    page = site(tmp_path, "`Adam`, then `WeightDecay`, is AdamW {identity: adamw}.")
    (link,) = re.findall(r'<a class="identity" href="(.+?)" title="(.+?)">', page)
    assert link == ("identities/#adamw", "tests/identities/methods/classic.py::adamw")


def test_a_claim_without_a_test_fails_the_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Abort):
        site(tmp_path, "`Adam`, then `Sign`, is nobody {identity: nobody}.")
    assert "{identity: nobody} has no test: add one to tests/identities/methods" in caplog.text


METHODS = "AdamW|LAMB|LARS|Lion|Signum|C-AdamW|Adafactor|StableAdamW|SPAM|AMSGrad|Nesterov"
SAYS = r"\b(?:is|as in|that of|makes|gives|are)(?: \S+)? `?"
THEIRS = rf"torch\.optim\.(?!Opt)\w+|torch\.nn\.utils\.\w+|(?:{METHODS})\b"
CLAIM = re.compile(rf"{SAYS}(?:{THEIRS})|gradient centralization of|rule of the paper|paper's rule")


def unmarked(text: str) -> Iterator[str]:
    """Sentences that equate something with a method, and lead to no test."""
    prose = re.sub(r"^ *```.*?^ *```|^:::.*?$|^ +>>> .*$", "", text, flags=re.M | re.S)
    for sentence in re.split(r"(?<=[.:;|])\s|\n\n", MARK.sub("✓", prose)):
        plain = " ".join(sentence.split())
        if CLAIM.search(plain) and not re.search(r"✓|\bnot\b|tests/identities", plain):
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
