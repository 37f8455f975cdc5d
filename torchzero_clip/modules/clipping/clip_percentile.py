"""ClipPercentile: a rule that limits every element to a percentile of all magnitudes."""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from torchzero_clip.core import Bucket, Live, Reach, TensorList, Transform
from torchzero_clip.core.bounds import Within
from torchzero_clip.core.norms import percentile, percentiles, percentiles_of_ranks


class ClipPercentile(Transform):
    """Value clipping without a threshold: the limit is a percentile of the magnitudes of u itself.

    Use it to limit the largest elements of every update, even if the scale of the updates changes.

    u ← min(max(u, -b), b), b the value at ⌊percentile · (len - 1) / 100⌋ of the sorted |u|

    The rule needs whole tensors, so it gathers sharded tensors, one at a time. With `dim="global"`,
    each rank stores all gathered tensors at once. With a `process_group`, the percentile covers all
    pipeline stages. Every stage then needs the same number of parameter groups.

    Args:
        percentile: The percentile, from 0 to 100. With 0 the limit is the smallest magnitude. With
            100 nothing changes. NaN counts as the largest magnitude.
        dim: None for a separate percentile per tensor, or "global" for one percentile of all
            tensors. Default: None.

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
        wholes = [bucket.whole(bucket.u) for bucket in buckets]
        # all bounds are known before the first clipping, which writes the measured tensors
        bounds = self._bounds(buckets, wholes)
        for bucket, bound in zip(buckets, bounds, strict=True):
            bucket.u = bucket.u.maximum_(bound.neg()).minimum_(bound)
        return buckets

    def _bounds(self, buckets: list[Bucket], wholes: list[list[Tensor]]) -> list[TensorList]:
        """Return the limit of every tensor: a list of limits for each bucket."""
        if self.dim == "global":
            shared_bounds = self._of_all(buckets, wholes)
            bounds = [[b] * len(tensors) for b, tensors in zip(shared_bounds, wholes, strict=True)]
        else:
            pairs = zip(buckets, wholes, strict=True)
            bounds = [percentiles(tensors, b.group["percentile"]) for b, tensors in pairs]
        return [
            TensorList([bound.to(bucket.device, tensors[0].dtype) for bound in bucket_bounds])
            for bucket, tensors, bucket_bounds in zip(buckets, wholes, bounds, strict=True)
        ]

    def _of_all(self, buckets: list[Bucket], wholes: list[list[Tensor]]) -> list[Tensor]:
        """Return, for each bucket, the percentile of all magnitudes on all pipeline stages."""
        step = buckets[0].step
        link = buckets[0].bound
        together = [t.to(buckets[0].device) for tensors in wholes for t in tensors]
        if step.process_group is None:
            return [percentile(together, bucket.group["percentile"]) for bucket in buckets]
        group_percentiles = [link.values(group)["percentile"] for group in step.groups]
        bounds = percentiles_of_ranks(together, group_percentiles, step.process_group).unbind()
        return [bounds[bucket.cohort.index] for bucket in buckets]
