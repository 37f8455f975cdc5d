"""OrthoGrad: a rule that removes the part of the update along the weights."""

from __future__ import annotations

import torch

from torchzero_clip.core import Bucket, Group, State, TensorList, Transform, Units
from torchzero_clip.core.norms import NAMED, measure, numbers
from torchzero_clip.core.transform import pairs


class OrthoGrad(Transform):
    """Orthogonal gradients: removes the part of the update that points along the weights.

    Put it before an optimizer. It prevents a model from reducing the loss by only scaling up the
    logits. The norm of the update does not change.

    u ← r ‖u‖ / ‖r‖;   r = u - (u · w / ‖w‖²) w

    The formula applies to each tensor. If r is zero, the result is zero. For example, this happens
    if the tensor has a single element.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, OrthoGrad
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), OrthoGrad(), Adam(), LR(1e-3))

    Reference:
        Prieto et al., "Grokking at the edge of numerical stability", arXiv 2501.04697.
    """

    reach = "tensor"
    per_entry = True
    widens = True
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure(2), name="OrthoGrad")
        norm = units.norm()
        weight_norm = units.norms_of([bucket.params for bucket in units.buckets])
        products = [bucket.view(_product) for bucket in units.buckets]
        share = units.statistics(products, NAMED["sum"])[0] / weight_norm**2
        share = torch.where(weight_norm > 0, share, 0)
        rests = [bucket.view(_rest, units, share=share) for bucket in units.buckets]
        rest_norm = units.norms_of(rests)
        eps = [torch.finfo(u.dtype).eps for u in rests for _ in range(len(u))]
        # a rest as small as rounding errors counts as zero
        only_rounding = rest_norm <= norm * numbers([8 * x for x in eps], norm)
        ratio = torch.where(only_rounding, torch.inf, rest_norm / norm)
        for bucket, rest in zip(units.buckets, rests, strict=True):
            bucket.apply(self, units, rest=rest, ratio=ratio)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return group["rest"].div(group["ratio"])


def _product(u: TensorList, state: State, group: Group) -> TensorList:
    """Return u · w for every element."""
    u = pairs(u)
    return u.mul(pairs(group["params"]).to(u.dtype))


def _rest(u: TensorList, state: State, group: Group) -> TensorList:
    """Return u without its part along w."""
    u = pairs(u)
    return u.sub(pairs(group["params"]).to(u.dtype).mul(group["share"]))
