"""A plan: the tails of a chain. They depend only on the chain, not on the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchzero_clip.core.link import Link


@dataclass(frozen=True)
class Tail:
    """A tail: the last links of a chain, if an engine can run all of them in one pass over memory.

    Args:
        rule: The link for which one of torch's fused optimizers computes the update and subtracts
            it. None if the tail only scales the update and subtracts it.
        scalings: The links after the rule. Each of them is u ← a · u + b · w.
        factor: The norm rule directly before the other links. The same pass divides by the ratio of
            this rule.
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
    """The tails of a chain. An engine with `fuses` runs a tail after all other links.

    Args:
        tails: The tails by their first links. Each scaling at the end of the chain also begins a
            tail. A bucket uses the tail of the first such link that the bucket reaches.
        factors: The norm rules for which a tail does the division.
    """

    tails: Mapping[Link, Tail] = field(default_factory=dict)
    factors: frozenset[Link] = frozenset()
