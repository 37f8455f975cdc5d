"""Clippy: a rule that limits each element of a step relative to the weight."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Group, Live, NormRule, State, TensorList
from torchzero_clip.core.bounds import NonNegative, Threshold


class Clippy(NormRule):
    """Relative step clipping: no element of a step may be large compared with its weight.

    Use it with `Adagrad` in recommender systems. Put it after `LR`, because the limit is for the
    final step.

    u ← u · min(1, minᵢ (relative · |wᵢ| + absolute) / |uᵢ|)

    One factor scales the whole tensor, so the direction of the step does not change. The element
    that exceeds its limit the most decides this factor.

    Args:
        relative: The largest change of a weight per step, as a fraction of the weight.
            Default: 0.1.
        absolute: A constant that is added to the limit, so that a weight at zero can move.
            `math.inf` never clips. Default: 1e-7.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adagrad, Clippy, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adagrad(), LR(0.1), Clippy())

    Reference:
        Tang et al., "Improving training stability for multitask ranking models in recommender
        systems", arXiv 2302.09178.
    """

    relative: Live[NonNegative] = 0.1
    absolute: Live[Threshold] = 1e-7

    ord = "linf"
    widens = True
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        largest_share = units.norms_of([bucket.view(_shares) for bucket in units.buckets])
        self.scale(units, largest_share, [1.0] * len(units.groups))
        return buckets


def _shares(u: TensorList, state: State, group: Group) -> TensorList:
    """Return |u| / limit for each element, where the limit is the largest allowed change."""
    limit = group["params"].to(u.dtype).abs().mul_(group["relative"]).add_(group["absolute"])
    size = u.abs()
    # a step of zero has share 0, even if its limit is 0
    return size.div(limit).where(size.positive(), size)
