"""Annotations: what is live, and what may stand in a field."""

from __future__ import annotations

import fractions
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import at_once
from torchzero_clip import LR, Adam, ClipNorm, Modular, Warmup
from torchzero_clip.core import Live, Transform
from torchzero_clip.core.annotation import Allowed, kind_of, read
from torchzero_clip.core.bounds import (
    AtLeastOne,
    Count,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    Share,
    Threshold,
    Whole,
    Within,
)


class Here:
    """A class whose annotations are asked."""


@at_once(
    ("hint, live"),
    [
        (Live[float], True),
        (Live[float | None], True),
        (Live[Share], True),
        (float, False),
        ("Live[float]", True),
        ("Live[Share | None]", True),
        ("'Live[Share]'", True),  # quoted, under `from __future__ import annotations`
        (Live["Share"], True),
        ("Live['Share | None']", True),
        ("'dict[str, float]'", False),
        ("dict[str, float]", False),
        ("dict[str, Elsewhere]", False),
    ],
)
def test_a_field_is_live_where_live_is_around_the_whole(hint: Any, live: bool) -> None:
    assert read(Here, "x", hint)[0] is live


@pytest.mark.parametrize("hint", ["Live[float] | None", "list[Live[float]]", Live[float] | None])
def test_live_inside_another_type_is_a_sentence(hint: Any) -> None:
    with pytest.raises(TypeError, match="Here: the annotation of 'x' must begin with Live"):
        read(Here, "x", hint)


@at_once(
    "hint, kind",
    [
        (Live[float], Allowed(float)),
        (Live[int | None], Allowed(int, True)),
        (bool, Allowed(bool)),
        (float | None, Allowed(float, True)),
        (float | int, None),
        (tuple[float, float], None),
        (str, None),
        (Literal["a", "b"], Allowed(choices=("a", "b"))),
        (Literal["a"] | None, Allowed(optional=True, choices=(None, "a"))),
        (Literal["a"] | int, None),
        (Live[Share], Allowed(float, bounds=Within(at_least=0, below=1))),
        (Live[Positive | None], Allowed(float, True, Within(above=0, below=math.inf))),
        (Count, Allowed(int, bounds=Within(at_least=1))),
        (Annotated[int, Within(at_least=2)], Allowed(int, bounds=Within(at_least=2))),
        (Live[tuple[Share, Share]], Allowed(float, False, Within(at_least=0, below=1), 2)),
        (tuple[Whole | None, Whole], Allowed(int, True, Within(at_least=0), 2)),
        (Callable[[int], int], Allowed(Callable)),
        (typing.Callable[..., Any] | None, Allowed(Callable, True)),
        (Callable[[int], int] | int, None),
    ],
)
def test_what_may_stand_in_a_field_is_read_from_its_annotation(hint: Any, kind: Any) -> None:
    assert kind_of(hint) == kind


@pytest.mark.parametrize(
    "hint",
    [
        tuple[Share, float],
        tuple[Share, Positive],
        tuple[Share, str],
        tuple[Share, ...],
        list[Share],
        dict[str, Whole],
        Share | str,
        Live[Share | Literal["auto"]],
    ],
    ids=str,
)
def test_bounds_where_none_are_checked_are_a_sentence(hint: Any) -> None:
    words = "Here: the annotation of 'x' has bounds that the library cannot check"
    with pytest.raises(TypeError, match=words):
        read(Here, "x", hint)


@at_once("hint", [None, type(None), "None"])
def test_an_annotation_of_nothing_says_nothing(hint: Any) -> None:
    assert read(Here, "x", hint) == (False, None)


# --- rules of a user's own


class Quoted(Transform):
    """A rule whose annotations are text in text."""

    beta: "Live[Share]" = 0.5  # noqa: UP037
    scale: Live["Positive | None"] = None  # noqa: UP037
    every: "Count" = 1  # noqa: UP037


@at_once("name, value", [("beta", 1.0), ("scale", 0.0), ("every", 0)])
def test_bounds_in_quotes_are_checked(name: str, value: Any) -> None:
    assert Quoted.live == ("beta", "scale")
    with pytest.raises(ValueError, match=f"Quoted: {name} must be"):
        Quoted(**{name: value})


class Bounded(Transform):
    """A rule whose arguments are checked, of which it says nothing but their kinds."""

    share: Live[Share] = 0.5
    part: Live[Fraction] = 1.0
    size: Live[Positive | None] = None
    pair: Live[tuple[NonNegative, NonNegative]] = (0.0, 1.0)
    every: Count = 1
    later: Whole = 0
    odd: Annotated[int, Within(above=2)] = 3
    whole: Live[Finite] = 1.0
    bounded: Live[Annotated[float, Within(at_least=0, below=math.inf)]] = 1.0
    below: Live[Annotated[float, Within(below=math.inf)]] = 1.0
    most: Live[Annotated[float, Within(above=-math.inf, at_most=1)]] = 1.0
    limit: Live[Threshold] = math.inf
    growth: Live[AtLeastOne] = math.inf
    how: Literal["up", "down"] | None = None
    fn: Callable[[float], float] = math.sqrt
    other: Callable[[float], float] | None = None

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u


@at_once(
    "name, value, sentence",
    [
        ("share", 1.0, "share must be a number of at least 0 and below 1, got 1.0"),
        ("share", -0.1, "share must be a number of at least 0 and below 1, got -0.1"),
        ("share", math.nan, "share must be a number of at least 0 and below 1, got nan"),
        ("share", None, "share must be a number of at least 0 and below 1, got None"),
        ("share", True, "share must be a number of at least 0 and below 1, got True"),
        ("fn", None, "fn must be a function, got None"),
        ("fn", 2.0, "fn must be a function, got 2.0"),
        ("other", "sqrt", "other must be a function or None, got 'sqrt'"),
        ("part", 1.1, "part must be a number of at least 0 and at most 1, got 1.1"),
        ("size", 0, "size must be a finite number above 0 or None, got 0"),
        ("pair", (0.1,), r"pair must be 2 finite numbers, each of at least 0, got (0.1,)"),
        ("pair", 0.1, "pair must be 2 finite numbers, each of at least 0, got 0.1"),
        ("pair", (0.1, -1.0), "pair must be 2 finite numbers, each of at least 0, got (0.1, -1.0)"),
        ("every", 0, "every must be an integer of at least 1, got 0"),
        ("every", 1.5, "every must be an integer of at least 1, got 1.5"),
        ("later", -1, "later must be an integer of at least 0, got -1"),
        ("odd", 2, "odd must be an integer above 2, got 2"),
        ("whole", math.inf, "whole must be a finite number, got inf"),
        ("whole", -math.inf, "whole must be a finite number, got -inf"),
        ("whole", math.nan, "whole must be a finite number, got nan"),
        ("size", math.inf, "size must be a finite number above 0 or None, got inf"),
        (
            "pair",
            (0.1, math.inf),
            "pair must be 2 finite numbers, each of at least 0, got (0.1, inf)",
        ),
        ("below", math.inf, "below must be a number below inf, got inf"),
        ("most", -math.inf, "most must be a finite number of at most 1, got -inf"),
        ("limit", math.nan, "limit must be a number of at least 0, got nan"),
        ("limit", -math.inf, "limit must be a number of at least 0, got -inf"),
        ("growth", math.nan, "growth must be a number of at least 1, got nan"),
        ("bounded", math.inf, "bounded must be a finite number of at least 0, got inf"),
        ("how", "left", "how must be one of [None, 'up', 'down'], got 'left'"),
    ],
)
def test_arguments_are_checked_by_their_annotations(name: str, value: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Bounded(**{name: value})
    assert str(caught.value) == f"Bounded: {sentence}"


@at_once("name", ["share", "part", "size", "pair", "every", "later", "odd", "how"])
def test_arguments_within_their_bounds_are_taken(name: str) -> None:
    good = {"share": 0, "part": 1, "size": 2.0, "pair": [3, 4.0], "every": 5, "how": "up"}
    Bounded(**{name: good.get(name, 7)})


@at_once("bounds", [Within(), Within(at_least=0), Within(above=0), Within(at_most=math.inf)])
def test_infinity_is_within_bounds_that_do_not_exclude_it_and_nan_never_is(bounds: Within) -> None:
    assert bounds.holds(math.inf)
    assert not bounds.holds(math.nan)


@at_once("key, value", [("share", 1.0), ("size", 0.0), ("pair", (1.0, -1.0)), ("whole", math.inf)])
def test_live_values_are_checked_where_a_step_reads_them(key: str, value: Any) -> None:
    from torchzero_clip import LR, Modular

    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([p], Bounded(), LR(0.1))
    opt.step()
    opt.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"Bounded: {key} must be"):
        opt.step()


def test_a_bound_that_is_named_inside_a_function_is_a_sentence() -> None:
    tight = Within(at_least=3)
    words = "Local: the annotation of 'size', .*tight.*, cannot be evaluated"
    with pytest.raises(TypeError, match=words):

        class Local(Transform):
            size: Live[Annotated[float, tight]] = 4.0


@pytest.mark.parametrize(
    "hint",
    [
        "Live[Elsewhere]",
        "tz.Live[Annotated[float, Elsewhere()]]",
        "Live[Nowhere] | None",
        "Live['Elsewhere']",
        "Annotated[float, Within(above=elsewhere)]",
    ],
)
def test_a_live_value_or_a_bound_that_cannot_be_evaluated_is_a_sentence(
    hint: str,
) -> None:
    words = r"Wrong: the annotation of 'beta', .*, cannot be evaluated: import"
    with pytest.raises(TypeError, match=words):
        type("Wrong", (Transform,), {"__annotations__": {"beta": hint}, "__module__": __name__})


def test_a_check_of_two_arguments_sees_them_within_their_bounds() -> None:
    class Ordered(Transform):
        low: NonNegative = 0.0
        high: NonNegative = 1.0

        def check(self) -> None:
            super().check()
            if self.low > self.high:
                raise ValueError(f"low must be at most high, got {self.low} and {self.high}")

    with pytest.raises(
        TypeError, match="Ordered: low must be a finite number of at least 0, got 'a'"
    ):
        Ordered("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low must be at most high"):
        Ordered(2.0)


# --- integers that are too large


@at_once(
    "make, words",
    [
        (LR, "LR: lr must be a finite number of at least 0, got {x}"),
        (lambda x: Adam((0.9, x)), "Adam: betas must be 2 numbers.*, got \\(0.9, {x}\\)"),
        (Warmup, "Warmup: steps must be an integer of at least 1, got {x}"),
        (lambda x: ClipNorm(1.0, ord=x), "ClipNorm: ord must be a number of at least 0.*, got {x}"),
        (lambda x: ClipNorm(1.0, min_size=x), "ClipNorm: min_size must be an integer.*, got {x}"),
    ],
)
def test_an_integer_that_no_number_of_torch_can_hold_is_refused_by_name(
    make: Callable[[int], Any], words: str
) -> None:
    for exponent, bits in ((400, 1329), (5000, 16610)):  # Python writes no more than 4300 digits
        too_large = f"an integer of {bits} bits, which is too large"
        with pytest.raises(ValueError, match=words.format(x=too_large)):
            make(10**exponent)


def test_a_large_integer_is_refused_in_groups_too() -> None:
    p = Parameter(torch.ones(2))
    words = "LR: lr must be a finite number of at least 0, got an integer of 1329 bits"
    with pytest.raises(ValueError, match=words):
        Modular([{"params": [p], "lr": 10**400}], LR(0.1))
    opt = Modular([p], LR(0.1))
    opt.param_groups[0]["lr"] = 10**400
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=f"group 0: {words}"):
        opt.step()
    assert p.tolist() == [1.0, 1.0]


def test_what_a_float_can_hold_is_taken() -> None:
    assert LR(10**300).lr == 10**300
    with pytest.raises(TypeError, match="LR: lr must be a finite number of at least 0"):
        LR(fractions.Fraction(10**400))
    with pytest.raises(ValueError, match=r"got a negative integer of 1329 bits$"):
        LR(-(10**400))


def test_a_loss_that_no_float_can_hold_is_refused_by_name() -> None:
    opt = Modular([Parameter(torch.ones(2))], LR(0.1))
    with pytest.raises(
        TypeError, match="report: loss= must be a number or a tensor with one element, got an"
    ):
        opt.report(loss=10**400)
