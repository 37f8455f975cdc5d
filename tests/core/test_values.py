"""Values of arguments: as Python's own, compared, and printed."""

from __future__ import annotations

import math
from collections import UserDict, deque
from dataclasses import dataclass, field, fields
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tests.helpers import at_once
from torchzero_clip import Scale
from torchzero_clip.core.argument_values import equal, is_default, live_value, python_number, shown


@at_once(
    "given, made",
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (Fraction(1, 4), 0.25),
        (deque([np.float64(1.0), 2]), (1.0, 2)),
        ([np.int32(1)], [1]),
        (UserDict({"a": np.float64(2.0)}), {"a": 2.0}),
    ],
)
def test_numbers_and_containers_of_others_become_those_of_python(given: Any, made: Any) -> None:
    found = python_number(given)
    assert found == made
    assert type(found) is type(made)
    assert repr(found) == repr(made)  # what is inside, too


def test_what_is_of_python_stays_the_same_object() -> None:
    for given in ((0.9, 0.99), [1, 2], "text", None, {"a": 1}):
        assert python_number(given) is given


@at_once(
    "given, made",
    [
        ([0.9, 0.99], (0.9, 0.99)),
        (([1, np.float64(2.0)], 3), ((1, 2.0), 3)),
        (deque([1]), (1,)),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_a_live_value_has_no_lists(given: Any, made: Any) -> None:
    assert repr(live_value(given)) == repr(made)


def test_a_live_value_without_lists_stays_the_same_object() -> None:
    for given in ((0.9, (1, 2)), 0.5, torch.ones(()), "text"):
        assert live_value(given) is given


@at_once(
    "a, b, same",
    [
        ((0.9, [1]), (0.9, [1]), True),
        ((1, 2), [1, 2], True),  # a checkpoint in JSON has lists
        (1, 1.0, False),
        (True, 1, False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"b": 1}, False),
        (Scale(2.0), Scale(2.0), True),
        (torch.ones(1), torch.ones(1), False),  # either may change
        (math.nan, math.nan, True),
    ],
)
def test_arguments_are_equal_in_kind_too(a: Any, b: Any, same: bool) -> None:
    assert equal(a, b) is same


@dataclass
class Options:
    number: float = 1.0
    many: list[int] = field(default_factory=list)
    needed: Any = field(kw_only=True)


def test_a_default_is_of_its_own_kind_and_one_that_is_made_counts() -> None:
    number, many, needed = fields(Options)
    assert is_default(number, 1.0)
    assert not is_default(number, 1)
    assert not is_default(number, torch.tensor(1.0))
    assert is_default(many, [])
    assert not is_default(many, [1])
    assert not is_default(needed, None)


@at_once(
    "value, text",
    [
        (math.inf, "float('inf')"),
        (-math.inf, "float('-inf')"),
        (torch.tensor(0.5), "0.5"),
        (torch.tanh, "torch.tanh"),
        ((1.0,), "(1.0,)"),
        ([1.0, math.nan], "[1.0, float('nan')]"),
        ({"a": (1, 2)}, "{'a': (1, 2)}"),
        (Scale(2.0), "Scale(factor=2.0)"),
        ("x", "'x'"),
    ],
)
def test_a_value_is_printed_as_it_is_written(value: Any, text: str) -> None:
    assert shown(value) == text


class Color(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


@at_once(
    "value",
    [
        Color.RED,
        Level.LOW,
        Access.WRITE,
        Access.READ | Access.WRITE,
        [(Color.RED, {"a": Level.LOW})],
    ],
)
def test_members_of_an_enum_are_shown_as_code(value: Any) -> None:
    assert eval(shown(value)) == value
