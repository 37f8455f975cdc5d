"""ClipPercentile: every entry within the percentile of the magnitudes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, TensorList, Transform


class ClipPercentile(Transform):
    """u ← min(max(u, -b), b), b the value at ⌊percentile · (len - 1) / 100⌋ of the sorted |u|

    Sharded tensors are gathered for it, one at a time; with "global" every rank holds all of them.

    Args:
        percentile: From 0 (the smallest magnitude bounds all) to 100 (nothing changes).
        dim: `None` for each tensor by itself, "global" for all together.

    Example:
        >>> opt = Modular(model.parameters(), ClipPercentile(99), Momentum(0.9), LR(1e-2))
    """

    percentile: Live[float]
    dim: Literal["global"] | None = None

    complex = "refuse"

    def check(self) -> None:
        super().check()
        self.require("percentile", at_least=0, at_most=100)
        self.require_one_of("dim", (None, "global"))

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        sizes = [self._sizes(bucket) for bucket in buckets]
        if self.dim == "global":
            home = buckets[0].params.peek[0].device
            together = torch.cat([t.to(home) for some in sizes for t in some])
        for bucket, some in zip(buckets, sizes, strict=True):
            p, device = bucket.group["percentile"], bucket.params.peek[0].device
            if self.dim == "global":
                bound = _at(together, p).to(device, bucket.state_dtype)
                bounds = TensorList([bound] * len(some))
            else:
                bounds = TensorList([_at(t, p) for t in some])
            u = bucket.u.to(bucket.state_dtype)
            bucket.u = u.maximum_(bounds.neg()).minimum_(bounds)
        return buckets

    def _sizes(self, bucket: Bucket) -> list[Tensor]:
        self.refuse_complex(bucket)
        return [t.abs().reshape(-1).to(bucket.state_dtype) for t in bucket.whole(bucket.u)]


def _at(sizes: Tensor, percentile: float | Tensor) -> Tensor:
    """The bound: an entry of the sorted magnitudes."""
    last = sizes.numel() - 1
    if last < 0:
        return sizes.new_zeros(())
    if isinstance(percentile, Tensor):  # as a number it would have to be read on the host
        index = (percentile * last / 100).to(sizes.device).floor().long()
        return sizes.sort().values.index_select(0, index.view(1)).view(())
    return sizes.kthvalue(int(percentile * last / 100) + 1).values
