"""Project: weights that a function puts back where they belong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchzero_clip.core import Group, State, TensorList, TensorwiseTransform


class Project(TensorwiseTransform):
    """w ← fn(w) after the step: u ← w - fn(w - u)

    Put it after LR, where the update is the step that will be subtracted. Entries that fn leaves as
    they are keep their step.

    Args:
        fn: A function of one weight as it would be after the step, which gives it as it shall be.
            It may write it.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Project
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), Project(torch.relu))
    """

    fn: Callable[[Tensor], Tensor]

    impure = (
        "fn may be any function: write a rule whose update has the formula on lists, as u.tanh(), "
        "and which says pure = True"
    )

    place = "end"

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        rows = zip(group["params"], u, strict=True)
        return TensorList([self._moved(w.to(step.dtype), step) for w, step in rows])

    def _moved(self, w: Tensor, step: Tensor) -> Tensor:
        end = w - step
        onto = self.fn(end.clone())
        return torch.where(onto == end, step, w - onto)
