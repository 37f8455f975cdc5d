"""What a row of the contract table says of a rule, and the refusals that many rows share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torchzero_clip import LR, Transform

inf, nan = math.inf, math.nan

Makers = Mapping[str, Callable[[], Transform]]


Bad = tuple[dict[str, Any], type[Exception], str]


@dataclass(frozen=True)
class Row:
    """One class: constructions, refusals, and which contracts hold how."""

    cls: type[Transform]
    good: Makers
    """Label -> a construction. Cover the arguments that change what the rule does."""
    bad: Sequence[Bad] = ()
    """(arguments that differ from `args`, the error, a piece of its sentence)"""
    args: dict[str, Any] = field(default_factory=dict)
    """The arguments that the class cannot do without."""
    loose: Makers = field(default_factory=dict)
    """Constructions with nothing to do for small gradients, however often they come."""

    memory: Literal["none", "guarded", "free"] = "none"
    """guarded: a step with a NaN or an infinity is as if it had not been; free: as in torch."""
    nonfinite: Literal["scaled", "shown", "entry", "hidden", "raises", "stops", "free"] = "free"
    """Stateless rules: an infinite norm makes finite entries 0 and infinite ones NaN (scaled), the
    unit shows that something was wrong (shown), each entry is for itself (entry); the device stops
    the program (stops)."""
    complex: Literal["turns", "pairs", "refuses", "free"] = "pairs"
    """turns: a rotation of all entries rotates the result; pairs: as pairs of real numbers."""
    scope: Mapping[str, str] = field(default_factory=dict)
    """Label -> "mixed" where units of several sizes have a say, or what `dim` does not tell:
    "slices" where rows and columns have a say in a tensor's own update."""
    per_entry: bool = False
    """Every entry is treated by itself."""
    squares: bool = False
    """Squares in the parameter's own precision limit the range, as in torch.optim."""
    adds: bool = False
    """A zero gradient need not give a zero update."""
    matrices: bool = False
    """Takes tensors of two or more dimensions only."""
    exact: bool = True
    """float64 gives more than float32 does."""
    draws: bool = False
    """Draws random numbers, one after another."""
    aims: bool = True
    """Takes target="grad"."""
    attaches: bool = True
    """`attach` takes it; what `release` takes is told by its reach."""
    reads_host: bool = False
    """Waits for the device: an exception."""
    traces: bool = True
    """torch.compile makes one graph of it; False marks an exception."""
    graphs: int = 1
    """Compilations at most; more than one where the number of the step decides what happens."""
    loops: int = 0
    """Operators a tensor and step, where torch has no foreach operator that would do."""
    amplifies: float = 1
    """What a limit multiplies the kept numbers by, their rounding among denormals included."""
    last: bool = False
    """Stands behind all that makes the step, in a construction with its learning rate."""
    measures: int = 1
    """How many lists of tensors the rule takes the norms of."""
    keeps: tuple[str, ...] = ()
    """The names of its state in the shape of the parameters, which may be in bfloat16."""


def with_lr(tfm: Transform, lr: float) -> list[Transform]:
    """The transform and a learning rate, unless one inside has its own."""
    return [tfm] if any("lr" in inner.live for inner in tfm.walk()) else [tfm, LR(lr)]


def scopes(
    make: Callable[..., Transform], slices: bool = True, inverse: bool = True
) -> dict[str, Any]:
    """A construction for every scope; `make` takes `dim` and `inverse_dims`."""
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
    """A construction for every kind of norm."""
    kinds = [0.5, 1, 3, 10, inf, 0, "l4", "mad", "std", "var", "sum"]
    return {f"ord {order}": lambda order=order: make(order) for order in kinds}


def number(name: str, *values: Any, error: type[Exception] = ValueError, words: str) -> list[Bad]:
    """Refusals of single values of one argument, each of which the sentence must repeat."""
    return [({name: value}, error, f"{name} must be {words}, got {value!r}") for value in values]


def at_least(name: str, bound: float, optional: bool = False) -> list[Bad]:
    """What every argument that must be a number from `bound` on refuses."""
    words = f"a number at least {bound:g}" + (" or None" if optional else "")
    wrong = ["1", True, (1.0, 2.0)] + ([] if optional else [None])
    return [
        *number(name, bound - 0.5, -inf, nan, words=words),
        *number(name, torch.tensor(bound - 0.5), words=words),
        *number(name, *wrong, error=TypeError, words=words),
    ]


def steps(name: str, bound: int) -> list[Bad]:
    """What every number of steps refuses."""
    words = f"an integer at least {bound}"
    return [
        *number(name, bound - 1, -7, words=words),
        *number(name, bound + 1.0, "3", None, True, error=TypeError, words=words),
    ]


def share(name: str, optional: bool = False) -> list[Bad]:
    """What every β refuses: it must be in [0, 1)."""
    words = "a number at least 0 and below 1" + " or None" * optional
    return [
        *number(name, 1.0, 1, 1.5, -0.1, nan, inf, words=words),
        *number(name, "0.9", True, (0.5, 0.5), error=TypeError, words=words),
        *number(name, *[None] * (not optional), error=TypeError, words=words),
    ]


def shares(name: str) -> list[Bad]:
    """What a pair of β refuses."""
    words = "2 numbers, each at least 0 and below 1"
    return [
        *number(name, (0.9, 1.0), (-0.1, 0.9), (nan, 0.9), words=words),
        *number(name, ("0.9", 0.9), (None, 0.9), error=TypeError, words=words),
        ({name: (0.9,)}, ValueError, name),
        ({name: (0.9, 0.9, 0.9)}, ValueError, name),
        ({name: 0.9}, TypeError, name),
    ]


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
    *number("min_size", -1, words="an integer at least 0"),
    *number("min_size", 1.5, None, error=TypeError, words="an integer at least 0"),
]


BAD_ORD: list[Bad] = [
    (
        {"ord": order},
        ValueError,
        f"ord must be a number at least 0, inf, or one of ['l0', 'l1', {rest}",
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


EVERYWHERE: list[Bad] = [
    (
        {"target": "gradient"},
        ValueError,
        "target must be one of ['update', 'grad'], got 'gradient'",
    ),
    ({"target": None}, ValueError, "target must be one of ['update', 'grad'], got None"),
    ({"name": "a/b"}, ValueError, "name must be a string without '/', got 'a/b'"),
    ({"name": 3}, ValueError, "name must be a string without '/', got 3"),
]
