"""Centralize: the mean exactly zero."""

from __future__ import annotations

import torch

from torchzero_clip.core import Bucket, Group, NormRule, Scope, State, TensorList


class Centralize(NormRule):
    """u ← u - mean(u)

    The gradient centralization of the paper takes the mean of each output unit, which for torch's
    layout (out, in, ...) is `Centralize(dim=0, inverse_dims=True)` (tested against
    Yonghongwei/Gradient-Centralization).

    Args:
        dim: What is averaged together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Centralize, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> gc = Centralize(dim=0, inverse_dims=True)
        >>> opt = Modular(model.parameters(), gc, Momentum(0.9), LR(1e-2))

    Reference:
        Yong et al., "Gradient centralization: a new optimization technique for deep neural
        networks", arXiv 2004.01461.
    """

    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 2

    per_entry = True
    complex = "whole"
    pure = True
    has_metrics = False

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        mean = units.mean()
        shift = torch.where(units.smaller_than(self.min_size), torch.zeros_like(mean), mean)
        for bucket in buckets:
            bucket.apply(self, units, mean=shift)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.sub_(group["mean"])
