"""Standardize: a rule that sets the mean to zero and the standard deviation to one."""

from __future__ import annotations

import math

import torch

from torchzero_clip.core import Bucket, Group, Live, NormRule, Scope, State, TensorList
from torchzero_clip.core.bounds import NonNegative
from torchzero_clip.core.norms import eps_of


class Standardize(NormRule):
    """Standardize shifts and scales the update to mean zero and standard deviation one.

    u ← (u - mean(u)) / (std(u) + eps)

    The rule uses the unbiased standard deviation. If all elements of an update are equal, up to
    rounding, the result is zero. A tensor with a single element passes unchanged.

    Args:
        eps: A small number that is added to the standard deviation. Default: 1e-8.
        dim: The elements that share one mean and one standard deviation, with the same choices as
            in `ClipNorm`. Default: None, which treats each tensor separately.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 2.

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
    per_entry = True
    widens = True
    complex = "whole"
    pure = True
    has_metrics = False

    leaves = "own"

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        mean = units.mean()
        std = units.norm()
        too_small = units.smaller_than(max(self.min_size, 2))
        shift = torch.where(too_small, torch.zeros_like(mean), mean)
        for members in units.groups:
            eps = members[0].group["eps"]
            for bucket in members:
                constant = std <= 4 * eps_of(mean, bucket.u.dtype) * mean.abs()
                scale = torch.where(constant, torch.full_like(std, math.inf), std + eps)
                scale = torch.where(too_small, torch.ones_like(std), scale)
                bucket.apply(self, units, shift=shift, scale=scale)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.sub_(group["shift"]).div_(group["scale"])
