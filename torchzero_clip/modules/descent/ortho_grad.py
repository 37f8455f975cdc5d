"""OrthoGrad: the part of the update that turns the weights, without what stretches them."""

from __future__ import annotations

import torch

from torchzero_clip.core import Bucket, Group, State, TensorList, Transform, Units
from torchzero_clip.core.norms import NAMED, measure, numbers
from torchzero_clip.core.transform import pairs


class OrthoGrad(Transform):
    """u ← r ‖u‖ / ‖r‖;   r = u - (u · w / ‖w‖²) w

    For each tensor. What has no such part, as every single number, becomes zero.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, OrthoGrad
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), OrthoGrad(), Adam(), LR(1e-3))

    Reference:
        Prieto et al., "Grokking at the edge of numerical stability", arXiv 2501.04697.
    """

    reach = "tensor"
    per_entry = widens = True
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure(2), name="OrthoGrad")
        before, size = units.norm(), units.norms_of([bucket.params for bucket in units.buckets])
        products = [bucket.view(_product) for bucket in units.buckets]
        share = units.statistics(products, NAMED["sum"])[0] / size**2
        share = torch.where(size > 0, share, 0)
        rest = [bucket.view(_rest, units, share=share) for bucket in units.buckets]
        after = units.norms_of(rest)
        eps = [torch.finfo(u.dtype).eps for u in rest for _ in range(len(u))]
        rounding = after <= before * numbers([8 * x for x in eps], before)
        ratio = torch.where(rounding, torch.inf, after / before)
        for bucket, u in zip(units.buckets, rest, strict=True):
            bucket.apply(self, units, rest=u, ratio=ratio)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return group["rest"].div(group["ratio"])


def _product(u: TensorList, state: State, group: Group) -> TensorList:
    u = pairs(u)
    return u.mul(pairs(group["params"]).to(u.dtype))


def _rest(u: TensorList, state: State, group: Group) -> TensorList:
    """u without the part of it along w."""
    u = pairs(u)
    return u.sub(pairs(group["params"]).to(u.dtype).mul(group["share"]))
