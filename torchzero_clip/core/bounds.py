"""Bounds of numbers, as annotations say them: `eps: Live[NonNegative]`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated


@dataclass(frozen=True)
class Within:
    """The bounds of a number, as in `share: Annotated[float, Within(at_least=0, below=1)]`.

    They are checked where arguments and live values are read.
    """

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf

    def holds(self, x: float) -> bool:
        """Whether a number is within them; infinity is, where there is no bound."""
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
"""A number of at least 0 and below 1, as the memory of an average has."""
Fraction = Annotated[float, Within(at_least=0, at_most=1)]
"""A number of at least 0 and at most 1."""
Whole = Annotated[int, Within(at_least=0)]
"""A whole number of at least 0."""
Count = Annotated[int, Within(at_least=1)]
"""A whole number of at least 1."""
