"""Cautious: only the entries that agree with the gradient."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, TensorList, Transform, Units
from torchzero_clip.core.norms import measure, numbers
from torchzero_clip.core.transform import pairs, unpaired


class Cautious(Transform):
    """u ← u · [u g > 0] / max(share kept, 1e-3)

    Put it after an optimizer such as Adam. The share is taken over each tensor.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Cautious, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), Cautious(), LR(1e-3))

    Reference:
        Liang et al., "Cautious optimizers: improving training with one line of code",
        arXiv 2411.16085.
    """

    reads_grads = True
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure("sum"), name="Cautious")
        agree = [self._agree(bucket) for bucket in units.buckets]
        kept, start = units.statistics(agree, units.order)[0], 0
        for bucket, mask in zip(units.buckets, agree, strict=True):
            entries = 1 + bucket.dtype.is_complex  # a complex number is a pair
            here = kept[start : (start := start + len(mask))].to(bucket.device, mask.dtype)
            size = numbers([n * entries for n in bucket.part.sizes], here)
            share = (here / size.clamp(min=1)).clamp(min=1e-3)
            u = pairs(bucket.u.to(bucket.state_dtype))
            u = bucket.entrywise(_kept, u, mask=mask, share=share)
            bucket.u = u if entries == 1 else unpaired(u)
        return buckets

    def _agree(self, bucket: Bucket) -> TensorList:
        u = bucket.beside(pairs(bucket.u.to(bucket.state_dtype)))
        return bucket.entrywise(_agreement, u, grads=pairs(bucket.grads))


def _agreement(u: TensorList, grads: TensorList) -> TensorList:
    """1 where update and gradient have one sign, else 0."""
    same = u.sign_().mul_(grads)  # u · g of two tiny numbers would be 0
    return same.sign_().maximum_(0.0)


def _kept(u: TensorList, mask: TensorList, share: Tensor) -> TensorList:
    return u.mul_(mask).div_(share)
