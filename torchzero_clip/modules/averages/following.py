"""Functions that start and update an average of weights. The rules in this folder share them.

Each parameter counts its own steps. If you unfreeze a parameter late, its average starts in that
step, at the weights of that step. The warm-up of the average then starts in that step as well. With
one count for the whole model, the average of this parameter would move too slowly, and would stay
near the frozen weights.
"""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, TensorList, zeros_like_state


def begun(param: Tensor) -> Tensor:
    """Return the first average of a parameter: a copy of its weights in the dtype of the state."""
    return zeros_like_state(param).copy_(param.detach())


def follow(average: TensorList, share: Tensor, u: TensorList, group: Group) -> None:
    """Move each average by the fraction `share` toward the weights after the step u.

    The old average and the weights use the same rounded `share`, so rounding causes no drift.
    """
    average.add_(average, alpha=-share).add_(group["params"], alpha=share).add_(u, alpha=-share)
