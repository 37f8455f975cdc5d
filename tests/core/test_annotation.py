"""Annotations: what is live, and which are numbers or truths."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import at_once
from torchzero_clip.core import Live
from torchzero_clip.core.annotation import evaluated, is_live, kind_of


class Here:
    """A class whose annotations are asked."""


@at_once(
    ("hint, live"),
    [
        (Live[float], True),
        (Live[float | None], True),
        (float, False),
        ("Live[float]", True),
        ("core.Live[float | None]", True),
        ("dict[str, float]", False),
    ],
)
def test_a_field_is_live_where_live_is_around_the_whole(hint: Any, live: bool) -> None:
    assert is_live(Here, "x", hint) is live


@pytest.mark.parametrize("hint", ["Live[float] | None", "list[Live[float]]", Live[float] | None])
def test_live_inside_another_type_is_a_sentence(hint: Any) -> None:
    with pytest.raises(TypeError, match="Here: the annotation of 'x' has Live inside another type"):
        is_live(Here, "x", hint)


@at_once(
    "hint, kind",
    [
        (Live[float], (float, False)),
        (Live[int | None], (int, True)),
        (bool, (bool, False)),
        (float | None, (float, True)),
        (float | int, None),
        (tuple[float, float], None),
        (str, None),
    ],
)
def test_numbers_and_truths_are_told_from_all_else(hint: Any, kind: Any) -> None:
    assert kind_of(hint) == kind


def test_text_is_evaluated_where_its_class_stands_or_stays_text() -> None:
    assert evaluated(Here, "Live[float]") == Live[float]
    assert evaluated(Here, "Elsewhere[float]") == "Elsewhere[float]"
    assert evaluated(Here, float) is float
