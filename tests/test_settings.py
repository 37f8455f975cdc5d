"""The table of what works where says what the contract table says, and links to its pages."""

import re
from pathlib import Path

from tests.table import settings

DOCS = Path(__file__).parent.parent / "docs"


def test_the_table_on_the_page_is_that_of_the_rows():
    assert settings() in (DOCS / "settings.md").read_text()


def test_every_row_links_to_its_page():
    for page in re.findall(r"\]\((.+?)\)", settings()):
        assert (DOCS / page).exists(), page
