"""MaxNorm: weights that stay in a ball."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, Ord, Scope, State, TensorList, Units
from torchzero_clip.core.bounds import NonNegative


class MaxNorm(NormRule):
    """w ← w · min(1, max_norm / ‖w‖) after the step: u ← w - (w - u) · min(1, max_norm / ‖w - u‖)

    Put it after LR, where the update is the step that will be subtracted.

    Args:
        max_norm: The largest norm that the weights may have.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together, as in `ClipNorm`: dim=1 each row of a matrix.
        inverse_dims: Take all dims except those given: dim=0 then is each output unit.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, MaxNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), MaxNorm(3.0, dim=1))

    Reference:
        Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
        JMLR 15 (2014).
    """

    max_norm: Live[NonNegative]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    widens = True
    place = "end"
    clips = False
    pure = True

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        project(self, units, units.each("max_norm"))
        return buckets


def project(rule: NormRule, units: Units, limits: Sequence[Tensor | float]) -> None:
    """Change the steps so that the weights end at the limits; units within theirs keep the step."""
    steps = iter([bucket.u for bucket in units.buckets])
    ends = [bucket.view(_less) for bucket in units.buckets]
    norm = units.norms_of(ends)
    ratios = rule.scale(units, norm, limits, ends)
    for members, ratio in zip(units.groups, ratios, strict=True):
        for bucket in members:
            moves = units.as_list(bucket, ratio != 1)
            bucket.u = bucket.view(_to, step=next(steps), moves=moves)


def _less(u: TensorList, state: State, group: Group) -> TensorList:
    """w - u: where a step ends, or the step that ends there."""
    return group["params"].to(u.dtype).sub(u)


def _to(end: TensorList, state: State, group: Group) -> TensorList:
    """The step that ends there, where it is to be changed."""
    return _less(end, state, group).where(group["moves"], group["step"])
