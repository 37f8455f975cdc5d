"""Graft: the size of one update and the direction of another."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from torchzero_clip.core import (
    Bucket,
    Description,
    NormRule,
    Ord,
    Scope,
    Transform,
    send,
    transformed,
)
from torchzero_clip.modules.flow.masked import check_keeps, check_outer


class Graft(NormRule):
    """u ← d · ‖n‖ / ‖d‖,   n = norm_of(u),   d = direction_of(u)

    Both see the update as it came. Where d is zero it stays zero.

    Args:
        norm_of: The transform or Chain whose result has the size.
        direction_of: The transform or Chain whose result has the direction. Guards, Freeze and
            Accumulate may not stand in either.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements have d as it is.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Graft, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Graft(Adam(), Momentum(0.9)), LR(1e-3))

    Reference:
        Agarwal et al., "Disentangling adaptive gradient methods from learning rates",
        arXiv 2002.11803.
    """

    norm_of: Transform
    direction_of: Transform
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    inner = "branches"
    widens = True
    sets_norm = True
    clips = False
    pure = True

    def check(self) -> None:
        super().check()
        check_outer(self)
        for name in ("norm_of", "direction_of"):
            tfm = getattr(self, name)
            if not isinstance(tfm, Transform):
                raise TypeError(f"Graft: {name} must be a Transform, got {tfm!r}")
            check_keeps(self, name, tfm)

    def children(self) -> Iterator[tuple[str | None, Description]]:
        yield "norm_of", self.norm_of
        yield "direction_of", self.direction_of

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        for link in buckets[0].bound.children:
            send(link, buckets, init=True)
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        flowing = [bucket.u for bucket in units.buckets]
        sizes, directions = [
            transformed(units.buckets, [u.borrow() for u in flowing], [link])
            for link in buckets[0].bound.children
        ]
        size = units.norms_of(sizes)
        size = torch.where(torch.isinf(size), math.nan, size)  # no limit would leave d as it is
        norm = units.norms_of(directions)
        self.scale(units, norm, [size] * len(units.groups), directions)
        return buckets
