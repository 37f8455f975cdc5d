"""Bounds of numbers in annotations, such as `eps: Live[NonNegative]`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated


@dataclass(frozen=True)
class Within:
    """The bounds of a number, as in `share: Annotated[float, Within(at_least=0, below=1)]`.

    The library checks the bounds at construction, and when a parameter group gets another value.
    NaN is never allowed. Infinity is allowed, unless a bound excludes it, such as
    `below=math.inf`. `Threshold` allows infinity. `NonNegative`, `Positive` and `Finite` do not.

    Args:
        at_least: The smallest allowed number.
        above: A number that the value must be larger than.
        below: A number that the value must be smaller than.
        at_most: The largest allowed number.
    """

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, x: float) -> bool:
        """Return whether a number is within the bounds."""
        if self.at_least is not None and not x >= self.at_least:
            return False
        if self.above is not None and not x > self.above:
            return False
        if self.below is not None and not x < self.below:
            return False
        if self.at_most is not None and not x <= self.at_most:
            return False
        return not math.isnan(x)

    @property
    def excludes_infinity(self) -> bool:
        """Whether the bounds exclude infinity, and one of them is infinite, such as `below=inf`."""
        infinite = [x for x in asdict(self).values() if x is not None and math.isinf(x)]
        return bool(infinite) and not self.holds(math.inf) and not self.holds(-math.inf)

    def __str__(self) -> str:
        bounds = [(name, x) for name, x in asdict(self).items() if x is not None]
        if self.excludes_infinity:
            bounds = [(name, x) for name, x in bounds if math.isfinite(x)]
        text = " and ".join([f"{name.replace('_', ' ')} {x:g}" for name, x in bounds])
        return f"of {text}" if text.startswith("at ") else text


Finite = Annotated[float, Within(above=-math.inf, below=math.inf)]
"""A number that is not infinite."""
NonNegative = Annotated[float, Within(at_least=0, below=math.inf)]
"""A number of at least 0 that is not infinite, such as a learning rate."""
Positive = Annotated[float, Within(above=0, below=math.inf)]
"""A number above 0 that is not infinite."""
AboveZero = Annotated[float, Within(above=0)]
"""A number above 0, or infinity."""
Threshold = Annotated[float, Within(at_least=0)]
"""A number of at least 0, such as the largest norm allowed. Infinity means that there is no limit.
"""
AtLeastOne = Annotated[float, Within(at_least=1)]
"""A number of at least 1, such as the largest growth. Infinity means that there is no limit."""
Share = Annotated[float, Within(at_least=0, below=1)]
"""A number of at least 0 and below 1, such as the decay rate of an average."""
Fraction = Annotated[float, Within(at_least=0, at_most=1)]
"""A number of at least 0 and at most 1."""
Whole = Annotated[int, Within(at_least=0)]
"""An integer of at least 0."""
Count = Annotated[int, Within(at_least=1)]
"""An integer of at least 1."""
