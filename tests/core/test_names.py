"""Choices by the name of a parameter, and names that are misspelt."""

import pytest

from torchzero_clip import LR, Adam, Modular, Orthogonalize
from torchzero_clip.core.names import by_name, hint


def test_a_name_comes_before_patterns_and_the_first_pattern_that_is_found_is_taken() -> None:
    choices = {"bias": 1, "head": 2, r"head\.bias$": 3, "head.bias": 4}
    assert by_name(choices, "head.bias") == "head.bias"
    assert by_name(choices, "body.head.bias") == "bias"
    assert by_name(choices, "head.weight") == "head"
    assert by_name(choices, "embed") is None


def test_a_pattern_that_is_none_is_a_sentence_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match=r"Orthogonalize: the keys of blocks .*The key '\(' is invalid: "
    ):
        Orthogonalize(blocks={"(": 2})


def test_what_is_near_is_offered_and_nothing_else() -> None:
    assert hint("max_nrom", ["max_norm", "dim"]) == ": did you mean 'max_norm'?"
    assert hint("zzz", ["max_norm", "dim"]) == ""


def test_the_hint_reaches_the_user() -> None:
    with pytest.raises(TypeError, match=r"Adam: there is no argument 'beta'.*'betas'"):
        Modular([], Adam(beta=(0.9, 0.99)), LR(0.1))  # type: ignore[call-arg]
