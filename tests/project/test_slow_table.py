"""The table of slow tests in CONTRIBUTING is what the marks say."""

from __future__ import annotations

import pytest

from scripts import slow


@pytest.mark.slow
def test_the_table_is_made_from_the_marks() -> None:
    (written,) = slow.PLACE.findall(slow.PAGE.read_text())
    assert written == slow.table(), "python scripts/slow.py writes it anew"
