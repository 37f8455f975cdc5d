"""Carry: a rule that adds the clipped part of an update to the next update."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, Transform, prepare, transformed, zeros_like_state
from torchzero_clip.modules.flow.masked import check_inner, check_keeps


class Carry(Transform):
    """Error feedback: adds the part that a rule has clipped to the update of the next step.

    Use it if clipping should not bias the direction over many steps. The clipped part is not lost.
    It is added later.

    u ← tfm(u + c);   c ← u + c - tfm(u + c)

    Here c is the clipped part. If an element of c would become NaN or infinite, the element does
    not change.

    Args:
        tfm: The rule or Chain that clips. It must not contain guards, `Freeze` or `Accumulate`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Carry, ClipValue, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Carry(ClipValue(0.01)), Momentum(0.9), LR(0.1))

    Reference:
        Elesedy, Hutter, "U-Clip: on-average unbiased stochastic gradient clipping",
        arXiv 2302.02971.
    """

    tfm: Transform

    inner = "chain"
    reach = "tensor"
    pure = True

    def check(self) -> None:
        super().check()
        check_inner(self)
        check_keeps(self, "tfm", self.tfm)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"carried": zeros_like_state(param)}

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        carried = [bucket.state["carried"] for bucket in buckets]
        sums = [bucket.u.add_(c) for bucket, c in zip(buckets, carried, strict=True)]
        clipped = transformed(buckets, [total.borrow() for total in sums])
        for bucket, c, total, u in zip(buckets, carried, sums, clipped, strict=True):
            rest = total.sub(u)
            c.copy_(rest.where(rest.isfinite(), c))
            bucket.u = u
        return buckets
