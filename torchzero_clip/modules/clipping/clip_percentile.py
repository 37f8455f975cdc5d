"""ClipPercentile: every entry within the percentile of the magnitudes."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from torchzero_clip.core import Bucket, Live, Reach, TensorList, Transform
from torchzero_clip.core.bounds import Within
from torchzero_clip.core.norms import percentile, percentiles, percentiles_of_ranks


class ClipPercentile(Transform):
    """u ← min(max(u, -b), b), b the value at ⌊percentile · (len - 1) / 100⌋ of the sorted |u|

    Sharded tensors are gathered for it, one at a time; with "global" every rank holds all of them.
    With `process_group` the percentile is of all stages, which have as many groups each.

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
        if self.dim == "global":
            bounds = self._of_all(buckets, every)
            rows = [[bound] * len(some) for bound, some in zip(bounds, every, strict=True)]
        else:
            pairs = zip(buckets, every, strict=True)
            rows = [percentiles(some, bucket.group["percentile"]) for bucket, some in pairs]
        out = []
        for bucket, some, row in zip(buckets, every, rows, strict=True):
            out.append(TensorList([b.to(bucket.device, some[0].dtype) for b in row]))
        return out

    def _of_all(self, buckets: list[Bucket], every: list[list[Tensor]]) -> list[Tensor]:
        """For each bucket the percentile of all magnitudes, those on other stages included."""
        step, link = buckets[0].step, buckets[0].bound
        together = [t.to(buckets[0].device) for some in every for t in some]
        if step.process_group is None:
            return [percentile(together, bucket.group["percentile"]) for bucket in buckets]
        shares = [link.values(group)["percentile"] for group in step.groups]
        bounds = percentiles_of_ranks(together, shares, step.process_group).unbind()
        return [bounds[bucket.cohort.index] for bucket in buckets]
