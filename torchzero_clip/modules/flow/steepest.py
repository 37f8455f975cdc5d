"""Steepest: a rule that scales a direction by its inner product with the update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, NormRule, Scope, Transform, prepare, transformed
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.modules.flow.layout_inside import grid_of_matrices, layout_inside
from torchzero_clip.modules.flow.masked import check_inner, check_keeps


class Steepest(NormRule):
    """Steepest descent: scales the direction of a transform by the dual norm of the update.

    Use it with `Orthogonalize` or `Sign` if a small gradient should lead to a small step.

    u ← ⟨u, d⟩ · d,   d = tfm(u)

    If d is the steepest direction in some norm, ⟨u, d⟩ is the dual norm of u. For `Orthogonalize`,
    the dual norm is the sum of the singular values. For `Sign`, the dual norm is the sum of the
    absolute values.

    Args:
        tfm: The rule or Chain that computes the direction. It must not contain guards, `Freeze` or
            `Accumulate`.
        dim: The elements that share one product ⟨u, d⟩, with the same choices as in `ClipNorm`.
            Default: None, one product per tensor. If the rule inside has a `layout`, None means one
            product per matrix.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` keep d unscaled. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Orthogonalize, Steepest
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> opt = Modular(matrices, EMA(0.95), Steepest(Orthogonalize()), LR(1e-2))

    Reference:
        Carlson et al., "Preconditioned spectral descent for deep learning", NeurIPS 2015; Lau et
        al., "PolarGrad", arXiv 2505.21799.
    """

    tfm: Transform
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    inner = "chain"
    widens = True
    sets_norm = True
    clips = False
    pure = True

    def check(self) -> None:
        super().check()
        check_inner(self)
        check_keeps(self, "tfm", self.tfm)

    @property
    def layout(self) -> MatrixLayout:
        """The layout of the first rule inside that has a layout."""
        return layout_inside(self.tfm)

    @property
    def scope(self) -> Scope:
        return () if self.dim is None and self.layout is not None else self.dim

    def grid(self, name: str, param: Tensor) -> Grid | None:
        return grid_of_matrices(self, name, param) if self.dim is None else None

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        updates = [bucket.u for bucket in units.buckets]
        directions = transformed(units.buckets, [u.borrow() for u in updates])
        norm = units.norms_of(directions)
        product = units.dot(updates, directions)
        if units.division.lengths is not None:
            norm = units.over(norm, whole=False)
            product = units.over(product, whole=False, function=torch.sum)
        size = product * norm
        # an infinite limit would not scale d, and so would hide the broken product
        size = torch.where(torch.isinf(size), math.nan, size)
        self.scale(units, norm, [size] * len(units.groups), directions)
        return buckets
