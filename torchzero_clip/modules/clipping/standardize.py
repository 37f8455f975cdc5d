"""Standardize: mean zero and standard deviation one."""

from __future__ import annotations

import math

import torch

from torchzero_clip.core import Bucket, Group, Live, NormRule, Scope, State, TensorList
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.norms import eps_of


class Standardize(NormRule):
    """u ← (u - mean(u)) / (std(u) + eps)

    The standard deviation is the unbiased one. A unit that is constant up to rounding becomes
    zeros; a single element is left alone.

    Args:
        eps: Added to the standard deviation.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Standardize
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Standardize(), LR(1e-3))
    """

    eps: Live[NonNegative] = 1e-8
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 2

    ord = "std"
    per_entry = widens = True
    complex = "whole"
    pure = True
    has_metrics = False

    leaves = "own"

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        mean, std = units.mean(), units.norm()
        alone = units.smaller_than(max(self.min_size, 2))
        shift = torch.where(alone, torch.zeros_like(mean), mean)
        for members in units.groups:
            eps = members[0].group["eps"]
            for bucket in members:
                flat = std <= 4 * eps_of(mean, bucket.u.dtype) * mean.abs()
                scale = torch.where(flat, torch.full_like(std, math.inf), std + eps)
                scale = torch.where(alone, torch.ones_like(std), scale)
                bucket.apply(self, units, shift=shift, scale=scale)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.sub_(group["shift"]).div_(group["scale"])
