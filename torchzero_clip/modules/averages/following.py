"""Functions that the rules with averaged weights share: how an average starts and moves.

Steps are counted for each parameter, not once for the model. A parameter that is unfrozen late has
an average of its own from that step on: it starts at the weights of that step, with the first
share and warm-up. With a count for the model, its average would count as an old one, and would
stay near the frozen weights.
"""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, TensorList, zeros_like_state


def begun(param: Tensor) -> Tensor:
    """Return an average that starts at the weights of a parameter, in the dtype of its state."""
    return zeros_like_state(param).copy_(param.detach())


def follow(average: TensorList, share: Tensor, u: TensorList, group: Group) -> None:
    """Move each average by its share toward the weights that are left after the step u.

    The same share multiplies the average and the weights, so rounding of the share does no harm.
    """
    average.add_(average, alpha=-share).add_(group["params"], alpha=share).add_(u, alpha=-share)
