"""Cautious: only the entries that agree with the gradient."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Group, State, TensorList, Transform, Units
from torchzero_clip.core.norms import measure, numbers
from torchzero_clip.core.transform import pairs


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

    reads = ("grads",)
    widens = per_entry = True
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure("sum"), name="Cautious")
        agree = [bucket.view(_agreement) for bucket in units.buckets]
        kept = units.statistics(agree, units.order)[0]
        entries = [1 + b.dtype.is_complex for b in units.buckets]  # a complex number is a pair
        sizes = [n * k for k, b in zip(entries, units.buckets, strict=True) for n in b.cohort.sizes]
        share = (kept / numbers(sizes, kept).clamp(min=1)).clamp(min=1e-3)
        for bucket, mask in zip(units.buckets, agree, strict=True):
            bucket.apply(self, units, mask=mask, share=share)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["mask"]).div_(group["share"])


def _agreement(u: TensorList, state: State, group: Group) -> TensorList:
    """1 where update and gradient have one sign, else 0."""
    same = pairs(u).sign().mul_(pairs(group["grads"]))  # u · g of two tiny numbers would be 0
    return same.sign_().maximum_(0.0)
