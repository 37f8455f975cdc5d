"""The table itself: every public transform is in it, and every kind of rule."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from tests.helpers import SHAPES
from tests.modules.rows.row import Row
from tests.table import GOOD, ROWS, concrete, required
from torchzero_clip import Chain


def test_every_public_transform_has_a_row():
    assert {row.cls.__name__ for row in ROWS} == concrete()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.cls.__name__)
def test_a_row_names_the_required_arguments_and_makes_its_class(row):
    assert row.good
    if row.cls is not Chain:
        assert set(row.args) == required(row.cls)
        made = [[*x] if isinstance(x := make(), Chain) else [x] for make in row.good.values()]
        assert any(type(x) is row.cls for links in made for x in links)


def test_the_cases_reach_every_scope_and_every_kind():
    scopes = {case.scope for case in GOOD}
    assert scopes == {"entry", "tensor", "slices", "layer", "group", "global", "mixed"}
    for flag in ("nonfinite", "memory", "complex"):
        assert {getattr(row, flag) for row in ROWS} == set(get_args(get_type_hints(Row)[flag]))
    assert any(len(shape) == 4 for shape in SHAPES.values())  # or channels_last tests nothing
