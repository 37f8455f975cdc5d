"""Clippy: no entry of a step far beyond the size of its weight."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Group, Live, NormRule, State, TensorList
from torchzero_clip.core.bounds import NonNegative


class Clippy(NormRule):
    """u ← u · min(1, minᵢ (relative · |wᵢ| + absolute) / |uᵢ|)

    The entry that goes farthest beyond its weight shortens all of its tensor, so the direction
    stays. It looks at the step itself, so it comes after `LR`.

    Args:
        relative: How much of a weight one step may change it by.
        absolute: What it may change by on top, so that a weight at zero can move.

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
    absolute: Live[NonNegative] = 1e-7

    ord = "linf"
    widens = True
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        farthest = units.norms_of([bucket.view(_shares) for bucket in units.buckets])
        self.scale(units, farthest, [1.0] * len(units.groups))
        return buckets


def _shares(u: TensorList, state: State, group: Group) -> TensorList:
    """What each entry is of the change that it may make."""
    most = group["params"].to(u.dtype).abs().mul_(group["relative"]).add_(group["absolute"])
    size = u.abs()
    return size.div(most).where(size.positive(), size)  # 0 where it changes nothing, and may not
