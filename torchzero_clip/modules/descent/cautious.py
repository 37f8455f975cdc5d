"""Cautious: a rule that keeps only the elements that agree with the gradient."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Group, State, TensorList, Transform, Units
from torchzero_clip.core.norms import measure, numbers
from torchzero_clip.core.transform import pairs


class Cautious(Transform):
    """Cautious update: sets the elements to zero whose sign differs from the gradient.

    Put it after an optimizer such as `Adam`. The remaining elements are scaled up to make up for
    the others.

    u ← u · [u g > 0] / max(share kept, 1e-3)

    Here g is the gradient, and [u g > 0] is 1 for the elements with the sign of their gradient and
    0 for the others. The share is computed for each tensor.

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
    per_entry = True
    widens = True
    reach = "tensor"
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(buckets, None, measure("sum"), name="Cautious")
        masks = [bucket.view(_agreement) for bucket in units.buckets]
        counts = units.statistics(masks, units.order)[0]
        sizes: list[int] = []
        for bucket in units.buckets:
            reals = 2 if bucket.dtype.is_complex else 1  # a complex element has two real parts
            sizes += [reals * size for size in bucket.cohort.sizes]
        share = (counts / numbers(sizes, counts).clamp(min=1)).clamp(min=1e-3)
        for bucket, mask in zip(units.buckets, masks, strict=True):
            bucket.apply(self, units, mask=mask, share=share)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["mask"]).div_(group["share"])


def _agreement(u: TensorList, state: State, group: Group) -> TensorList:
    """Return 1 for the elements whose update has the sign of the gradient, else 0."""
    # the product of two tiny numbers could be 0, the product of a sign and a number is not
    same = pairs(u).sign().mul_(pairs(group["grads"]))
    return same.sign_().maximum_(0.0)
