"""The left column: on a laptop it fits the screen, on whatever page its reader is."""

import importlib.util
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT

ROWS = 26  # of 27 pixels, which is what 900 leave below the tabs

source = importlib.util.spec_from_file_location("navigation", ROOT / "docs" / "_hooks" / "rules.py")
assert source is not None
assert source.loader is not None
hook = importlib.util.module_from_spec(source)
source.loader.exec_module(hook)


def tabs() -> list[Any]:
    """The navigation of mkdocs.yml with the pages of the rules, a section for each tab."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    nav = yaml.safe_load("nav:" + text.partition("\nexclude_docs:")[0])["nav"]
    return hook.on_config(types.SimpleNamespace(nav=nav)).nav


def rows(entries: list[Any], depth: int = 0) -> int:
    """The rows of the column: sections of a tab are open, and of those in them one at a time."""
    inner = [body for entry in entries if isinstance(entry, dict) for body in entry.values()]
    folders = [rows(body, depth + 1) for body in inner if isinstance(body, list)]
    return len(entries) + (sum(folders) if depth == 0 else max(folders, default=0))


@pytest.mark.parametrize("tab", tabs(), ids=lambda tab: next(iter(tab)))
def test_the_left_column_of_every_tab_fits_the_screen_of_a_laptop(tab: dict[str, Any]) -> None:
    ((_, body),) = tab.items()
    assert (rows(body) if isinstance(body, list) else 1) <= ROWS


def test_how_to_pages_are_sorted_by_task() -> None:
    (guides,) = (tab["How-to"] for tab in tabs() if "How-to" in tab)
    assert [next(iter(group)) for group in guides] == ["Training", "Runs", "Scale"]


def test_a_label_in_the_navigation_is_the_title_of_its_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nexclude_docs:")[0]
    labelled = re.findall(r"- ([^:\n]+): \S+\.md", text)
    assert labelled == ["API"]  # a tab of a single page
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    titles = [title for page in pages for title in re.findall(r"^# (.+)$", page, re.M)[:1]]
    assert len(titles) == len(pages) - 1  # the changelog includes a file
    assert len(set(titles)) == len(titles)


def test_every_page_is_in_the_navigation_once() -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else []:
            for each in [inner] if isinstance(inner, str) else inner:
                yield from leaves(each)

    found = [leaf for tab in tabs() for leaf in leaves(tab)]
    docs = ROOT / "docs"
    assert sorted(found) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_a_first_page_leads_to_what_comes_up_next(page: str) -> None:
    """No decay for biases, several batches as one, averaged weights, what the chain is."""
    folder = "docs/" if page == "README.md" else ""
    text = (ROOT / page).read_text()
    for name in ("groups", "accumulation", "averages", "check"):
        assert f"]({folder}{name}.md)" in text


def test_a_search_for_what_torch_calls_an_optimizer_finds_what_it_is_here() -> None:
    """Words of titles weigh most; the words of a few pages weigh more than the same elsewhere."""
    boosted = [p.name for p in (ROOT / "docs").rglob("*.md") if "\n  boost: " in p.read_text()]
    assert set(boosted) == {
        "accumulation.md",
        "adam.md",
        "averages.md",
        "check.md",
        "checkpoints.md",
        "coming_from.md",
        "concepts.md",
        "distributed.md",
        "fused_weights.md",
        "groups.md",
        "guards.md",
        "matrices.md",
        "metrics.md",
        "tutorial.md",
    }
    page = (ROOT / "docs" / "coming_from.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE)[0] == "torch: AdamW, SGD and others"
    for name in ("AdamW", "SGD"):
        assert f"| `torch.optim.{name}(params" in page
