"""The numbers of pages are in their source and up to date, and `help` shows nothing but text."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest

import torchzero_clip
from scripts import refresh
from scripts.pages import drawings
from scripts.pages.kinds import NUMBERS
from tests.helpers import ROOT, at_once

COMMENT = re.compile(r"<!-- .*? -->", re.DOTALL)
SAYS_NOTHING = re.compile(r"<!-- (?:atlas entry|lab): .+? -->")
"""Comments that stand in place of no number: for the code of the atlas, and for the built site."""


def shown(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@at_once("page", refresh.PAGES)
def test_a_page_is_up_to_date(page: Path) -> None:
    stale = [path.name for path, _ in refresh.Refreshed(page, quick=True).stale()]
    assert stale == [], "run python scripts/refresh.py"


@at_once("page", refresh.PAGES)
def test_no_page_shows_a_comment_in_place_of_a_number(page: Path) -> None:
    text = shown(page)
    assert [m[0] for m in refresh.MARKED.finditer(text) if not m[3].strip()] == []
    assert COMMENT.findall(SAYS_NOTHING.sub("", refresh.MARKED.sub("", text))) == []
    assert "{identity" not in text


@at_once("page", refresh.PAGES)
def test_no_number_begins_a_line(page: Path) -> None:
    """Markdown would take the rest of the line for HTML, and show links and emphasis as written."""
    begun = re.compile(rf"^[ \t]*(?:[-*>] +)?<!-- (?:{'|'.join(NUMBERS)}): ", re.MULTILINE)
    assert begun.findall(shown(page)) == []


PUBLIC = [
    name
    for name in torchzero_clip.__all__
    if inspect.isclass(value := getattr(torchzero_clip, name)) or inspect.isfunction(value)
]


@at_once("name", PUBLIC)
def test_help_shows_no_mark(name: str) -> None:
    text = pydoc.render_doc(getattr(torchzero_clip, name), renderer=pydoc.plaintext)
    assert not re.search(r"<!--|\{identity|\]\(\S+\.md", text)


def test_every_drawing_is_shown_and_every_drawing_that_is_shown_is_there() -> None:
    address = re.compile(r"^!\[.*\]\((\S+\.svg)\)$", re.MULTILINE)
    found = {(p.parent / x).resolve() for p in refresh.PAGES for x in address.findall(shown(p))}
    assert [path for path in found if not path.exists()] == []
    assert {path for path in found if path.parent == drawings.FOLDER} == {
        *drawings.FOLDER.glob("*.svg")
    }


def page_with(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_a_number_is_written_where_it_is_missing_or_wrong(tmp_path: Path) -> None:
    for old in ("", "Two seeds"):
        page = page_with(tmp_path, f"**What came.** <!-- seeds: soap -->{old}<!-- /seeds -->.")
        found = refresh.Refreshed(page)
        assert found.text == "**What came.** <!-- seeds: soap -->Ten seeds<!-- /seeds -->."
        assert list(found.stale()) == [(page, found.text)]
        page.write_text(found.text)
        assert list(refresh.Refreshed(page).stale()) == []


def test_a_table_stands_between_blank_lines(tmp_path: Path) -> None:
    page = page_with(tmp_path, "<!-- settings --><!-- /settings -->")
    text = refresh.Refreshed(page).text
    assert text.startswith("<!-- settings -->\n\n| | eager |")
    assert text.endswith(" |\n\n<!-- /settings -->")


def test_a_figure_becomes_an_image_with_its_legend_and_its_caption(tmp_path: Path) -> None:
    figure = (
        '<figure class="picture"><svg viewBox="0 0 10 20" role="img" aria-label="a &amp; b">'
        '<circle/></svg><figcaption><span class="s0">one</span>, <span class="s1">two</span>. '
        "after <code>ZClip()</code></figcaption></figure>"
    )
    text, files = drawings.stored(figure, "soap picture", tmp_path / "page.md")
    ((path, svg),) = files.items()
    assert path == drawings.FOLDER / "soap-picture.svg"
    assert re.fullmatch(r"!\[a & b\]\(\S+/soap-picture\.svg\)\n\nAfter `ZClip\(\)`", text)
    assert re.findall(r'<polyline class="(\w+)".*?<text [^>]*>(\w+)', svg) == [
        ("s0", "one"),
        ("s1", "two"),
    ]


def test_a_drawing_may_differ_by_rounding_and_by_no_more() -> None:
    assert refresh.same_drawing('points="1.0,2.5"', 'points="1.1,2.4"')
    assert not refresh.same_drawing('points="1.0,2.5"', 'points="1.0,9.5"')
    assert not refresh.same_drawing('points="1.0,2.5"', 'points="1.0,2.5 3.0,1.0"')


# ---------------------------------------------------------------------- the built site


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook of the site, for pages in a folder of their own."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: it is in the extra dev")
    source = importlib.util.spec_from_file_location(
        "refreshed", ROOT / "docs" / "_hooks" / "refreshed.py"
    )
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCS", tmp_path)
    return module


PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))


@pytest.mark.parametrize(("number", "warnings"), [("Two seeds", 1), ("Ten seeds", 0)])
def test_the_build_warns_of_a_number_that_is_wrong(
    hook: Any, tmp_path: Path, number: str, warnings: int
) -> None:
    """A warning fails the strict build."""
    page = page_with(tmp_path, f"In <!-- seeds: soap -->{number}<!-- /seeds -->.")
    logs = TestCase().assertLogs if warnings else TestCase().assertNoLogs
    with logs("mkdocs", "WARNING"):
        shown = hook.on_page_markdown(page.read_text(), PAGE)
    assert shown == f"In {number}."


def test_the_site_shows_drawings_in_its_colours_and_the_whole_atlas(
    hook: Any, tmp_path: Path
) -> None:
    (tmp_path / "one.svg").write_text("<svg>1</svg>\n")
    image = '![a "[b]" c](one.svg)'
    page_with(tmp_path, "")
    shown = hook.on_page_markdown(f"a\n\n{image}\n{image}\n\nb", PAGE)
    drawn = "<svg>1</svg>\n<svg>1</svg>"
    assert shown == f'a\n\n<figure class="picture panels">\n{drawn}\n</figure>\n\nb'
    table = hook.on_page_markdown("<!-- atlas: table -->\n\n| |\n\n<!-- /atlas -->", PAGE)
    assert table.count("<tr>") > 1000
    assert 'href="../modules/clipping/clip_norm/"' in table
