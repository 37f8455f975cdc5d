"""Steepest: a direction, as long as the update is steep along it."""

from __future__ import annotations

import math

import torch

from torchzero_clip.core import Bucket, NormRule, Scope, Transform, prepare, transformed
from torchzero_clip.modules.flow.masked import check_inner, check_keeps


class Steepest(NormRule):
    """u ← ⟨u, d⟩ · d,   d = tfm(u)

    Where d is the direction that a norm makes steepest, ⟨u, d⟩ is the dual norm of u: that of
    `Orthogonalize` is the sum of the singular values, that of `Sign` the sum of absolute values.

    Args:
        tfm: The transform or Chain that makes the direction. Guards, Freeze and Accumulate may not
            stand in it.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements have d as it is.

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

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        flowing = [bucket.u for bucket in units.buckets]
        made = transformed(units.buckets, [u.borrow() for u in flowing])
        norm = units.norms_of(made)
        size = units.dot(flowing, made) * norm
        size = torch.where(torch.isinf(size), math.nan, size)  # no limit would leave d as it is
        self.scale(units, norm, [size] * len(units.groups), made)
        return buckets
