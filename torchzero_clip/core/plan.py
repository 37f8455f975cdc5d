"""Plan: the tails of a chain, which depend only on the chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchzero_clip.core.link import Link


@dataclass(frozen=True)
class Tail:
    """The last links of a chain, if an engine can run all of them in one pass over memory.

    Args:
        rule: The link whose update one of torch's fused optimizers computes and subtracts. None if
            the tail only scales the update and subtracts it.
        scalings: The links after the rule. Each of them is u ← a · u + b · w.
        factor: The norm rule directly before the other links. The same pass divides by its ratio.
    """

    rule: Link | None
    scalings: tuple[Link, ...]
    factor: Link | None

    @property
    def links(self) -> tuple[Link, ...]:
        """The links of the tail in order, without the norm rule."""
        return self.scalings if self.rule is None else (self.rule, *self.scalings)


@dataclass(frozen=True)
class ChainPlan:
    """The tails of a chain. An engine that fuses runs them after all other links.

    Args:
        tails: The tails by their first links. Each scaling at the end of the chain begins a tail
            too: a bucket uses the tail of the first such link that it reaches.
        factors: The norm rules whose division is done by a tail.
    """

    tails: Mapping[Link, Tail] = field(default_factory=dict)
    factors: frozenset[Link] = frozenset()
