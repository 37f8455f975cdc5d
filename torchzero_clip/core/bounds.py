"""Bounds of numbers in annotations, such as `eps: Live[NonNegative]`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated


@dataclass(frozen=True)
class Within:
    """The bounds of a number, as in `share: Annotated[float, Within(at_least=0, below=1)]`.

    The library checks the bounds at construction, and when a parameter group gets another value.

    Args:
        at_least: The smallest allowed number.
        above: A number that the value must be larger than.
        below: A number that the value must be smaller than.
        at_most: The largest allowed number.
    """

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf

    def holds(self, x: float) -> bool:
        """Return whether a number is within the bounds.

        If there is no upper bound, infinity is within the bounds.
        """
        above = x > self.above or self.above == -math.inf
        below = x < self.below or self.below == math.inf
        return self.at_least <= x <= self.at_most and above and below

    def __str__(self) -> str:
        named = [(name.replace("_", " "), x) for name, x in asdict(self).items()]
        return " and ".join([f"{name} {x:g}" for name, x in named if math.isfinite(x)])


NonNegative = Annotated[float, Within(at_least=0)]
"""A number of at least 0."""
Positive = Annotated[float, Within(above=0)]
"""A number above 0."""
AtLeastOne = Annotated[float, Within(at_least=1)]
"""A number of at least 1."""
Share = Annotated[float, Within(at_least=0, below=1)]
"""A number of at least 0 and below 1, such as the decay rate of an average."""
Fraction = Annotated[float, Within(at_least=0, at_most=1)]
"""A number of at least 0 and at most 1."""
Whole = Annotated[int, Within(at_least=0)]
"""An integer of at least 0."""
Count = Annotated[int, Within(at_least=1)]
"""An integer of at least 1."""
