"""Cautious: a rule that keeps only the elements whose sign agrees with the gradient."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Group, State, TensorList, Transform, Units
from torchzero_clip.core.norms import measure, numbers
from torchzero_clip.core.transform import pairs


class Cautious(Transform):
    """Cautious update: sets elements to zero if their sign differs from the sign of the gradient.

    Put it after an optimizer such as `Adam`. The rule scales up the remaining elements to
    compensate for the zeros.

    u ← u · [u g > 0] / max(share kept, 1e-3)

    Here g is the gradient. [u g > 0] is 1 if u and g have the same sign, and 0 otherwise. For each
    tensor, the share kept is the mean of [u g > 0].

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
    """Return 1 for each element whose update has the sign of the gradient, and 0 elsewhere."""
    # the product of two tiny numbers could be 0, the product of a sign and a number is not
    same = pairs(u).sign().mul_(pairs(group["grads"]))
    return same.sign_().maximum_(0.0)
