"""Lists of rules come from the classes: a new rule touches five files, none of which is a list."""

import re

import pytest

import torchzero_clip as tz
from benchmarks.atlas import rules as atlas
from scripts.pages import rules
from tests.helpers import ROOT
from tests.table import ROWS, concrete

CRITERIA = {n for n in tz.__all__ if tz.Criterion in getattr(getattr(tz, n), "__mro__", ())[1:]}
RULES = concrete() - {"Chain"} | CRITERIA
LINK = re.compile(r"\]\((.+?)\)")


def test_the_navigation_has_every_rule_once():
    def leaves(entry):
        for name, pages in entry.items():
            if isinstance(pages, str):
                yield name, pages
            else:
                for page in pages:
                    yield from leaves(page)

    found = [leaf for section in rules.navigation() for leaf in leaves(section)]
    assert sorted(name for name, _ in found) == sorted(RULES)
    for name, page in found:
        assert f"::: torchzero_clip.{name}\n" in (ROOT / "docs" / page).read_text(), page


def test_the_index_has_a_row_for_every_rule():
    page = (ROOT / "docs" / "modules" / "index.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\((.+?)\) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(RULES)
    for _, link, said in rows:
        assert (ROOT / "docs" / "modules" / link).exists(), link
        assert said.replace("`", "").strip()


def test_the_settings_have_a_row_for_every_class_of_the_contract_table():
    page = (ROOT / "docs" / "tested.md").read_text()
    rows = re.findall(r"^\| \[?(\w+)(?:\]\((.+?)\))? \| (?:✓|no)", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted({row.cls.__name__ for row in ROWS})
    assert all((ROOT / "docs" / link).exists() for _, link in rows if link)
    said = {line.split(" | ")[0]: line.split(" | ")[2] for line in page.splitlines() if "✓" in line}
    assert said["| [Noise](modules/flow/noise.md)"] == "no"
    assert said["| [When](modules/flow/when.md)"] == "✓ ¹"


def test_a_rule_without_a_page_is_an_error_that_says_where_to_write_one(monkeypatch):
    monkeypatch.setattr(rules, "MODULES", ROOT / "docs" / "recipes")
    with pytest.raises(FileNotFoundError, match="ClipNorm has no page: write one in docs/mod"):
        rules.link("ClipNorm")


@pytest.mark.parametrize("file", ["mkdocs.yml", "torchzero_clip/__init__.py"])
def test_a_list_that_is_made_names_no_rule(file):
    words = {"Adam", "Scale"}  # that stand there for something else: Scale is a group of guides
    assert set(re.findall(r"\w+", (ROOT / file).read_text())) & (RULES - words) == set()


def test_the_page_of_a_rule_puts_it_into_the_atlas(tmp_path, monkeypatch):
    """With a name, what Python makes of x, the places where it stands, and whose the picture is."""
    page = tmp_path / "clipping" / "sign.md"
    page.parent.mkdir()
    monkeypatch.setattr(atlas, "PAGES", tmp_path)
    page.write_text(
        "<!-- atlas entry: Two | ClipNorm(2 * x.norm), Sign() | before Adam, alone | together -->\n"
        "<!-- atlas entry: Sign | Sign() -->\n\n::: torchzero_clip.Sign\n"
    )
    (name, two), (other, one) = atlas.entries()
    assert (name, other) == ("Two", "Sign")
    assert repr(two.make(atlas.Usual(3.0))) == "[ClipNorm(max_norm=6.0), Sign()]"
    assert (two.page, two.places, two.together) == ("Sign", ("before Adam", "alone"), True)
    assert (one.page, one.places, one.together) == ("Sign", atlas.EVERYWHERE, False)
    page.write_text("<!-- atlas entry: Sign | Sign() | nowhere -->\n\n::: torchzero_clip.Sign\n")
    with pytest.raises(ValueError, match=r"sign.md: an atlas entry is a name, links, its places"):
        list(atlas.entries())
