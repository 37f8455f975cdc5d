"""Choices by the name of a parameter, and names that are misspelt."""

from typing import Any

import pytest

from torchzero_clip import LR, Adam, Modular, Orthogonalize
from torchzero_clip.core.names import by_name, hint, without_match


def test_a_name_comes_before_patterns_and_the_first_pattern_that_is_found_is_taken() -> None:
    choices = {"*.bias": 1, "tail.* | head.*": 2, "head.b?as": 3, "head.bias": 4}
    assert by_name(choices, "head.bias") == "head.bias"
    assert by_name(choices, "body.head.bias") == "*.bias"
    assert by_name(choices, "head.weight") == "tail.* | head.*"
    assert by_name(choices, "my.head.weight") is None
    assert by_name(choices, "bias") is None


@pytest.mark.parametrize("key", [3, "", "a | ", "|"])
def test_a_key_that_is_no_pattern_is_an_error(key: Any) -> None:
    with pytest.raises(ValueError, match=r"Orthogonalize: the keys of layout must be names or pat"):
        Orthogonalize(layout={key: [2]})


def test_the_first_part_without_a_match_is_found() -> None:
    names = ["a.weight", "b.weight", "b.bias"]
    assert without_match(["*.weight", "b.*"], names) is None
    assert without_match(["*.weight | c.*"], names) == "c.*"
    assert without_match(["a.bias"], names) == "a.bias"
    assert without_match(["b.bias | x"], ["b.bias | x"]) is None


def test_what_is_near_is_offered_and_nothing_else() -> None:
    assert hint("max_nrom", ["max_norm", "dim"]) == ": did you mean 'max_norm'?"
    assert hint("zzz", ["max_norm", "dim"]) == ""


def test_the_hint_reaches_the_user() -> None:
    with pytest.raises(TypeError, match=r"Adam: there is no argument 'beta'.*'betas'"):
        Modular([], Adam(beta=(0.9, 0.99)), LR(0.1))  # type: ignore[call-arg]
