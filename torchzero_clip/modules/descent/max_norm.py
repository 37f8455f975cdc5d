"""MaxNorm: a rule that limits the norm of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, Ord, Scope, State, TensorList, Units
from torchzero_clip.core.bounds import Threshold


class MaxNorm(NormRule):
    """Max-norm regularization: limits the norm of the weights after each step.

    Put it after `LR`, where the update is the step that is subtracted from the weights.

    w ← w · min(1, max_norm / ‖w‖) after the step: u ← w - (w - u) · min(1, max_norm / ‖w - u‖)

    If the new weights are within the limit, the step does not change.

    Args:
        max_norm: The largest norm of the weights.
        ord: The norm to measure: a number such as 2, or a name such as "l1", "linf", "rms", "std"
            or "mad". Default: 2.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`. With `dim=1`,
            each row of a matrix has its own norm. Default: None, one norm per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. With `dim=0`, each
            output unit then has its own norm. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, MaxNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), MaxNorm(3.0, dim=1))

    Reference:
        Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting",
        JMLR 15 (2014).
    """

    max_norm: Live[Threshold]
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
    """Change each step after which the weights would not meet their limit. Keep all other steps."""
    steps = iter([bucket.u for bucket in units.buckets])
    ends = [bucket.view(_w_minus_u) for bucket in units.buckets]
    norm = units.norms_of(ends)
    ratios = rule.scale(units, norm, limits, ends)
    for members, ratio in zip(units.groups, ratios, strict=True):
        for bucket in members:
            moves = units.as_list(bucket, ratio != 1)
            bucket.u = bucket.view(_step_to, step=next(steps), moves=moves)


def _w_minus_u(u: TensorList, state: State, group: Group) -> TensorList:
    """Return w - u.

    If u is a step, the result is the new weights. If u is the new weights, the result is the step.
    """
    return group["params"].to(u.dtype).sub(u)


def _step_to(end: TensorList, state: State, group: Group) -> TensorList:
    """Return the step from the weights to `end`, or the old step for units that do not change."""
    return _w_minus_u(end, state, group).where(group["moves"], group["step"])
