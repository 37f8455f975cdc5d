"""The rows of the contract table: what a row tells about a rule, and errors of many rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchzero_clip import LR, Transform

inf, nan = math.inf, math.nan

Makers = Mapping[str, Callable[[], Transform]]


Bad = tuple[dict[str, Any], type[Exception], str]


@dataclass(frozen=True)
class Row:
    """One class: how to construct it, which arguments raise an error, and which properties it has.

    The general tests read the properties. CONTRIBUTING.md lists the common ones.
    """

    cls: type[Transform]
    good: Makers
    """Valid constructions by label. Cover the arguments that change what the rule does."""
    bad: Sequence[Bad] = ()
    """(arguments that differ from `args`, the class of the error, a part of its message)

    Only what the annotations do not exclude: the tests derive values beyond bounds and of other
    types from the annotations.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """The arguments without a default."""
    loose: Makers = field(default_factory=dict)
    """Constructions that leave small gradients unchanged in every step."""

    memory: Literal["none", "guarded", "free"] = "none"
    """What a step with NaN or infinity does to the state.

    - none: the rule has no state.
    - guarded: later steps are the same as without the step.
    - free: no test requires anything, as in torch.
    """
    nonfinite: Literal["scaled", "shown", "entry", "hidden", "raises", "stops", "free"] = "free"
    """What the rule makes of NaN and infinity in a gradient.

    - scaled: if the norm is NaN, the whole unit becomes NaN. If the norm is infinite, finite
      elements become 0 and infinite elements become NaN.
    - shown: no element of the unit is finite.
    - entry: a NaN element stays NaN, an infinite element becomes the bound, and other elements do
      not change.
    - hidden: the result is finite.
    - raises: the step raises an error that names the parameter.
    - stops: an assertion on the device stops the program.
    - free: no test requires anything.
    """
    complex: Literal["turns", "pairs", "refuses", "free"] = "pairs"
    """What the rule does with complex gradients.

    - turns: a rotation of all elements rotates the result.
    - pairs: the rule treats a complex number as two real numbers.
    - refuses: a complex parameter raises an error.
    - free: no test requires anything.
    """
    scope: Mapping[str, str] = field(default_factory=dict)
    """The scope of a construction by label, if `dim` does not tell it.

    It is "mixed" if several scopes affect an update, and "slices" if rows and columns affect the
    update of their tensor.
    """
    per_entry: bool = False
    """Whether the rule is elementwise."""
    squares: bool = False
    """Whether squares in the precision of the parameter limit the range, as in torch.optim."""
    adds: bool = False
    """Whether a zero gradient may give an update that is not zero."""
    matrices: bool = False
    """Whether the rule accepts only tensors with two or more dimensions."""
    exact: bool = True
    """Whether the rule is more accurate in float64 than in float32."""
    draws: bool = False
    """Whether the rule draws random numbers."""
    aims: bool = True
    """Whether the rule accepts target="grad"."""
    attaches: bool = True
    """Whether `attach` accepts the rule."""
    reads_host: bool = False
    """Whether the rule synchronizes with the device, which is an exception."""
    traces: bool = True
    """Whether torch.compile makes one graph of a step. False is an exception."""
    graphs: int = 1
    """The largest number of compilations, more than 1 if the step number decides what happens."""
    loops: int = 0
    """The number of operators for each tensor, if torch has no foreach operator for the rule."""
    amplifies: float = 1
    """The factor by which a threshold multiplies the rounding errors of stored denormal numbers."""
    last: bool = False
    """Whether the rule goes after the learning rate."""
    measures: int = 1
    """The number of lists of tensors whose norms the rule computes."""
    keeps: tuple[str, ...] = ()
    """The names of state in the shape of the parameters, which may be stored in bfloat16."""


def with_lr(tfm: Transform, lr: float) -> list[Transform]:
    """Return the transform and a learning rate, unless a transform inside has its own."""
    return [tfm] if any("lr" in inner.live for inner in tfm.walk()) else [tfm, LR(lr)]


def scopes(
    make: Callable[..., Transform], slices: bool = True, inverse: bool = True
) -> dict[str, Any]:
    """Return a construction for every scope. `make` accepts `dim` and `inverse_dims`."""
    asked: dict[str, dict[str, Any]] = {
        "tensor": {},
        "layer": {"dim": "layer"},
        "group": {"dim": "group"},
        "global": {"dim": "global"},
    }
    if slices:
        asked["rows"] = {"dim": -1}
        asked["columns"] = {"dim": 0}
        asked["two dims"] = {"dim": (0, -1)}
    if slices and inverse:
        asked["all but the first"] = {"dim": 0, "inverse_dims": True}
    return {label: lambda kw=kw: make(**kw) for label, kw in asked.items()}


def orders(make: Callable[[Any], Transform]) -> dict[str, Any]:
    """Return a construction for every kind of norm."""
    kinds = [0.5, 1, 3, 10, inf, 0, "l4", "mad", "std", "var", "sum"]
    return {f"ord {order}": lambda order=order: make(order) for order in kinds}


def number(name: str, *values: Any, error: type[Exception] = ValueError, words: str) -> list[Bad]:
    """Return rows of `bad` for values of one argument. Each message must contain the value."""
    return [({name: value}, error, f"{name} must be {words}, got {value!r}") for value in values]


DIM = "dim must be None, an int, a sequence of ints, 'layer', 'group' or 'global'"


BAD_DIM: list[Bad] = [
    ({"dim": "tensor"}, ValueError, f"{DIM}, got 'tensor'"),
    ({"dim": 0.5}, TypeError, "dim must be an int or a sequence of ints, got 0.5"),
    ({"dim": True}, TypeError, "dim must be an int or a sequence of ints, got True"),
    ({"dim": (0, "a")}, TypeError, "dim must be an int or a sequence of ints, got (0, 'a')"),
]


BAD_SLICES: list[Bad] = [
    *BAD_DIM,
    ({"inverse_dims": True}, ValueError, "inverse_dims=True requires dim to be an int or a"),
    ({"dim": "global", "inverse_dims": True}, ValueError, "a sequence of ints, got dim='global'"),
    *number("min_size", -1, words="an integer of at least 0"),
]


BAD_ORD: list[Bad] = [
    (
        {"ord": order},
        ValueError,
        f"ord must be a number of at least 0, inf, or one of ['l0', 'l1', {rest}",
    )
    for order, rest in (
        ("l5", "'l2', 'l3', 'l4', 'linf', 'mad', 'rms', 'std', 'var', 'sum'], got 'l5'"),
        (-1, "'l2'"),
        (nan, "'l2'"),
        (None, "'l2'"),
        (True, "'l2'"),
    )
]


NO_SLICES: list[Bad] = [
    *BAD_DIM,
    ({"dim": 0}, ValueError, "dim must be None, 'layer', 'group' or 'global', got 0. An int"),
    ({"dim": (0, 1)}, ValueError, "dim must be None, 'layer', 'group' or 'global', got (0, 1). "),
]


BAD_LAYOUT: list[Bad] = [
    ({"layout": 3}, TypeError, "layout must be a dict of name patterns and layouts"),
    ({"layout": {"|": [3]}}, ValueError, "the keys of layout must be names or patterns, such as"),
    ({"layout": {"w": 3}}, ValueError, "the layout 3 for the names 'w' is invalid: a layout mu"),
    (
        {"layout": {"w": [3.0, 3.0]}},
        ValueError,
        "the layout [3.0, 3.0] for the names 'w' is invalid: a",
    ),
    (
        {"layout": {"w": [-1, 7]}},
        ValueError,
        "the layout [-1, 7] for the names 'w' is invalid: a l",
    ),
    ({"layout": {"w": True}}, ValueError, "the layout True for the names 'w' is invalid: a layo"),
    ({"layout": {"w": "a b"}}, ValueError, "the layout 'a b' for the names 'w' is invalid: the pa"),
]


EVERYWHERE: list[Bad] = [
    ({"name": "a/b"}, ValueError, "name must be a string without '/', got 'a/b'"),
    ({"name": 3}, ValueError, "name must be a string without '/', got 3"),
    *BAD_ORD,
    *BAD_LAYOUT,
]
"""What every class refuses that has the arguments."""
