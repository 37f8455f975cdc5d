"""Project: a rule that projects the weights after each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchzero_clip.core import Group, State, TensorList, TensorwiseTransform


class Project(TensorwiseTransform):
    """Projected gradient descent: a custom function moves the weights after each step.

    Put it after `LR`, where the update is the step that is subtracted from the weights.

    w ← fn(w) after the step: u ← w - fn(w - u)

    If `fn` does not change an element, the step of this element does not change.

    Args:
        fn: A function that receives the new value of one weight tensor and returns the projected
            tensor. It may change its argument in place.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Project
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), Project(torch.relu))
    """

    fn: Callable[[Tensor], Tensor]

    impure = (
        "fn can be any function: write a Transform with pure = True whose update calls methods of "
        "TensorList, such as u.tanh()"
    )

    place = "end"

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        pairs = zip(group["params"], u, strict=True)
        return TensorList([self._moved(w.to(step.dtype), step) for w, step in pairs])

    def _moved(self, w: Tensor, step: Tensor) -> Tensor:
        """Return the step from the weight to the projection of the new weight."""
        end = w - step
        projection = self.fn(end.clone())
        return torch.where(projection == end, step, w - projection)
