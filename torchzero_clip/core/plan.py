"""Plan: the tails of a chain, which follow from the chain alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchzero_clip.core.link import Link


@dataclass(frozen=True)
class Tail:
    """The end of a chain that one pass over memory can do, at which an engine may run it.

    Args:
        rule: The link whose update one of torch's fused optimizers computes and subtracts. None if
            the update is there already, and is only scaled and subtracted.
        scalings: The links after it, each of which is u ← a · u + b · w.
        factor: The norm rule right before them, by whose ratio the same pass divides.
    """

    rule: Link | None
    scalings: tuple[Link, ...]
    factor: Link | None

    @property
    def links(self) -> tuple[Link, ...]:
        """All links of the tail but the norm rule, in order."""
        return self.scalings if self.rule is None else (self.rule, *self.scalings)


@dataclass(frozen=True)
class ChainPlan:
    """The tails of a chain, which an engine that fuses runs after all other links.

    Args:
        tails: Each tail, under the first of its links. There are several if parameters take
            different ways through the chain.
        factors: The norm rules by whose ratio a tail divides.
    """

    tails: Mapping[Link, Tail] = field(default_factory=dict)
    factors: frozenset[Link] = frozenset()
