"""Centralize: a rule that subtracts the mean."""

from __future__ import annotations

import torch

from torchzero_clip.core import Bucket, Group, NormRule, Scope, State, TensorList


class Centralize(NormRule):
    """Gradient centralization: subtracts the mean of the update, so that the new mean is zero.

    Use it before an optimizer such as SGD with momentum to regularize the weights of a layer.

    u ← u - mean(u)

    The paper subtracts one mean per output unit. For weights of shape (out, in, ...), as in torch,
    this is `Centralize(dim=0, inverse_dims=True)` (tested against
    Yonghongwei/Gradient-Centralization).

    Args:
        dim: The elements that share one mean: None for each tensor, an int or ints for each slice
            along these dims, or "layer", "group" or "global". Default: None.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 2.

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
