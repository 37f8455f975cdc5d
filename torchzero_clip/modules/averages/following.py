"""What averages of weights share: where they stand, how they begin and move.

Steps are counted for each parameter, not once for the model. A parameter that is unfrozen late has
weights of its own from there on: its average begins at these, with the first share and warm-up, its
mean is over as many as there were, and it is drawn back after k steps that it has made. A count of
the model would take its average for one that is long under way, and hold it at where it was frozen.
"""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, TensorList, zeros_like_state


def begun(param: Tensor) -> Tensor:
    """An average that begins at a parameter, in the dtype of its state."""
    return zeros_like_state(param).copy_(param.detach())


def follow(average: TensorList, share: Tensor, u: TensorList, group: Group) -> None:
    """Move averages by a share, one a tensor, towards the weights that the step u leaves.

    What is taken off and what is put there is multiplied by one number, however that is rounded.
    """
    average.add_(average, alpha=-share).add_(group["params"], alpha=share).add_(u, alpha=-share)
