"""Project: a rule that projects the weights after each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchzero_clip.core import Group, State, TensorList, TensorwiseTransform


class Project(TensorwiseTransform):
    """Projected gradient descent: a function maps the weights after each step to allowed weights.

    Put it after `LR`, where the update is the step that is subtracted from the weights.

    w ← fn(w) after the step: u ← w - fn(w - u)

    Elements that `fn` does not change keep their step.

    Args:
        fn: A function that receives one weight as it would be after the step, and returns the
            allowed weight. It may change its argument in place.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Project
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), Project(torch.relu))
    """

    fn: Callable[[Tensor], Tensor]

    impure = (
        "fn may be any function: write a rule whose update has the formula on lists, such as "
        "u.tanh(), and which sets pure = True"
    )

    place = "end"

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        pairs = zip(group["params"], u, strict=True)
        return TensorList([self._moved(w.to(step.dtype), step) for w, step in pairs])

    def _moved(self, w: Tensor, step: Tensor) -> Tensor:
        """Return the step that leads to the projection of the weight."""
        end = w - step
        projection = self.fn(end.clone())
        return torch.where(projection == end, step, w - projection)
