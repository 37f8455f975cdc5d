"""The search of the pages: what people type finds the page that they mean.

The build of the documentation asks the same of its own index, which has the docstrings, too.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, at_once

pytest.importorskip("mkdocs", reason="mkdocs is not installed: it is in the extra dev")
source = importlib.util.spec_from_file_location("search", ROOT / "docs" / "_hooks" / "search.py")
assert source is not None
assert source.loader is not None
hook = importlib.util.module_from_spec(source)
source.loader.exec_module(hook)

CONFIG = {
    "separator": r"(?:[\s.,()\[\]=`*|:]|(?<=\w\w)-)+",
    "fields": {"title": {"boost": 1e3}, "text": {"boost": 1}},
}


def sections(page: Path) -> Iterator[dict[str, Any]]:
    """The entries of a page, one for itself and one for each heading."""
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda block: block[0].replace("#", ""), page.read_text())
    boost = re.match(r"---\nsearch:\n  boost: (\d+)", text)
    location = page.relative_to(ROOT / "docs").with_suffix("").as_posix() + "/"
    for i, part in enumerate(re.split(r"^#+ ", text, flags=re.M)[1:]):
        title, _, body = part.partition("\n")
        entry = {"location": location + f"#{i}" * bool(i), "title": title, "text": body}
        if boost:
            entry["boost"] = int(boost[1])
        yield entry


def search(docs: list[dict[str, Any]]) -> Any:
    return hook.Search({"config": CONFIG, "docs": docs})


PAGES = search([entry for page in (ROOT / "docs").rglob("*.md") for entry in sections(page)])


@at_once("query, page", list(hook.ASKED.items()))
def test_what_people_type_finds_the_page_first(query: str, page: str) -> None:
    assert PAGES.pages(query)[0] == page


def test_titles_pages_and_rare_words_count_most() -> None:
    docs = [
        {"location": "a/", "title": "Clip", "text": "often often rare"},
        {"location": "b/", "title": "Other", "text": "a clip, often"},
        {"location": "c/", "title": "Third", "text": "often"},
        {"location": "c/#clip", "title": "Clips", "text": "rare <code>words</code>"},
    ]
    assert search(docs).pages("clip") == ["a/", "c/", "b/"]
    assert search(docs).pages("rare often") == ["a/", "b/", "c/"]
    assert search(docs).pages("nothing") == []


def test_a_build_says_which_words_find_another_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(hook.logger, "warning", lambda text, *args: said.append(text % args))
    docs = [{"location": page, "title": query, "text": ""} for query, page in hook.ASKED.items()]
    (tmp_path / "search").mkdir()
    for more in ([], [{"location": "new/", "title": "gpus, multiple multiple gpus", "text": ""}]):
        index = json.dumps({"config": CONFIG, "docs": docs + more})
        (tmp_path / "search" / "search_index.json").write_text(index)
        hook.on_post_build({"site_dir": tmp_path})
    assert said == ["a search for 'multiple gpus' finds new/ first, and not distributed/"]
