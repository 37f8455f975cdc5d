"""Graft: a rule that combines the norm of one update with the direction of another update."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

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
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.modules.flow.layout_inside import grid_of_matrices, layout_inside
from torchzero_clip.modules.flow.masked import check_keeps, check_outer


class Graft(NormRule):
    """Grafting: combines the norm of one update with the direction of another update.

    Use it to give an optimizer such as `Shampoo` the well-known step sizes of `Adam`.

    u ← d · ‖n‖ / ‖d‖,   n = norm_of(u),   d = direction_of(u)

    Both inner rules receive the same update u. If d is zero, the result is zero.

    Args:
        norm_of: The rule or Chain that decides the norm.
        direction_of: The rule or Chain that decides the direction. Guards, `Freeze` and
            `Accumulate` are not allowed in `norm_of` and `direction_of`.
        ord: The norm to measure: a number such as 2, or a name such as "l1", "linf", "rms", "std"
            or "mad". Default: 2.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`.
            Default: None, one norm per tensor. If a rule inside has a `layout`, None means one norm
            per matrix, and `ord` must be 2.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` keep the norm of d.
            Default: 1.

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
        if self.dim is None and self.layout is not None and self.ord not in (2, "l2"):
            raise ValueError(
                "Graft: ord must be 2 if a rule inside has a layout, because each matrix has a "
                f"norm, got {self.ord!r}"
            )

    @property
    def layout(self) -> MatrixLayout:
        """The layout of the first rule inside that has a layout."""
        return layout_inside(self.direction_of, self.norm_of)

    @property
    def scope(self) -> Scope:
        return () if self.dim is None and self.layout is not None else self.dim

    def grid(self, name: str, param: Tensor) -> Grid | None:
        return grid_of_matrices(self, name, param) if self.dim is None else None

    def children(self) -> Iterator[tuple[str | None, Description]]:
        yield "norm_of", self.norm_of
        yield "direction_of", self.direction_of

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        for link in buckets[0].bound.children:
            send(link, buckets, init=True)
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        updates = [bucket.u for bucket in units.buckets]
        sizes, directions = [
            transformed(units.buckets, [u.borrow() for u in updates], [link])
            for link in buckets[0].bound.children
        ]
        size = units.norms_of(sizes)
        norm = units.norms_of(directions)
        if units.division.lengths is not None:
            size = units.over(size, whole=False)
            norm = units.over(norm, whole=False)
        # an infinite limit would not scale d, and so would hide the broken norm
        size = torch.where(torch.isinf(size), math.nan, size)
        self.scale(units, norm, [size] * len(units.groups), directions)
        return buckets
