"""OrthoGrad: the part of the update that turns the weights, without what stretches them."""

from __future__ import annotations

import torch

from torchzero_clip.core import Bucket, TensorList, Transform, Units
from torchzero_clip.core.norms import NAMED, measure, numbers
from torchzero_clip.core.tensorlist import Operand
from torchzero_clip.core.transform import pairs, unpaired


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
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure(2), name="OrthoGrad")
        rest = [pairs(bucket.u.to(bucket.state_dtype)) for bucket in units.buckets]
        weights = [pairs(bucket.params.to(bucket.state_dtype)) for bucket in units.buckets]
        before, size = units.norms_of(rest), units.norms_of(weights)
        rows = list(zip(units.buckets, rest, weights, strict=True))
        products = [bucket.entrywise(TensorList.mul, u, x=w) for bucket, u, w in rows]
        share = units.statistics(products, NAMED["sum"])[0] / size**2
        share = torch.where(size > 0, share, 0)
        rest = [
            bucket.entrywise(_without, u, w=w, share=units.operand(bucket, share))
            for bucket, u, w in rows
        ]
        after = units.norms_of(rest)
        eps = [torch.finfo(b.state_dtype).eps for b in units.buckets for _ in b.part.sizes]
        rounding = after <= before * numbers([8 * x for x in eps], before)
        ratio = torch.where(rounding, torch.inf, after / before)
        for bucket, u in zip(units.buckets, rest, strict=True):
            u = bucket.entrywise(TensorList.div_, u, x=units.operand(bucket, ratio))
            bucket.u = unpaired(u) if bucket.dtype.is_complex else u
        return buckets


def _without(u: TensorList, w: TensorList, share: Operand) -> TensorList:
    return u.sub_(w.mul(share))
