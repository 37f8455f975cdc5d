"""ClipPercentile: every entry within the percentile of the magnitudes."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from torchzero_clip.core import Bucket, Live, Reach, TensorList, Transform
from torchzero_clip.core.bounds import Within
from torchzero_clip.core.norms import percentile, percentiles


class ClipPercentile(Transform):
    """u ← min(max(u, -b), b), b the value at ⌊percentile · (len - 1) / 100⌋ of the sorted |u|

    Sharded tensors are gathered for it, one at a time; with "global" every rank holds all of them.

    Args:
        percentile: From 0 (the smallest magnitude bounds all) to 100 (nothing changes).
        dim: `None` for each tensor by itself, "global" for all together.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipPercentile, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipPercentile(99), Momentum(0.9), LR(1e-2))
    """

    percentile: Live[Annotated[float, Within(at_least=0, at_most=100)]]
    dim: Literal["global"] | None = None

    complex = "refuse"
    widens = True
    pure = True

    @property
    def reach(self) -> Reach:
        return "tensor" if self.dim is None else "model"

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        every = [bucket.whole(bucket.u) for bucket in buckets]
        bounds = self._bounds(buckets, every)  # all of them before a group is cut where it lies
        for bucket, bound in zip(buckets, bounds, strict=True):
            bucket.u = bucket.u.maximum_(bound.neg()).minimum_(bound)
        return buckets

    def _bounds(self, buckets: list[Bucket], every: list[list[Tensor]]) -> list[TensorList]:
        """For each bucket the bound of every tensor."""
        home = buckets[0].device
        together = [t.to(home) for some in every for t in some] if self.dim == "global" else []
        out = []
        for bucket, some in zip(buckets, every, strict=True):
            p = bucket.group["percentile"]
            if together:
                bounds = [percentile(together, p)] * len(some)
            else:
                bounds = percentiles(some, p)
            out.append(TensorList([b.to(bucket.device, some[0].dtype) for b in bounds]))
        return out
