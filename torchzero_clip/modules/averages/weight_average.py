"""WeightAverage: a rule that keeps the plain mean of past weights, for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import Count, Whole
from torchzero_clip.modules.averages.following import begun, follow


class WeightAverage(Transform):
    """Stochastic weight averaging: keeps the plain mean of past weights, for evaluation.

    Put it last, where the update is the step that is subtracted from the weights. The rule does not
    change the update. Inside `with opt.averaged():`, the model has the mean of the weights.

    a ← a + (w - u - a) / n, the mean of n weights, for evaluation; u stays as it is

    Until `start` steps are done, a is equal to the weights.

    Args:
        start: The number of steps before averaging starts. Default: 0.
        every: Add the weights to the mean every `every` steps. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Momentum, WeightAverage
        >>> model = torch.nn.Linear(10, 1)
        >>> mean = WeightAverage(start=1000, every=100)
        >>> opt = Modular(model.parameters(), Momentum(0.9), LR(0.1), mean)

    Reference:
        Izmailov et al., "Averaging weights leads to wider optima and better generalization",
        arXiv 1803.05407.
    """

    start: Whole = 0
    every: Count = 1

    place = "end"
    leaves = "gradient"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param), "mean": begun(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        t = state["step"].stack() - self.start
        state["step"].add_(1)
        n = (t / self.every).clamp(min=0) + 1
        counts = (t < 0) | (t % self.every == 0)
        follow(state["mean"], torch.where(counts, 1 / n, 0.0), u, group)
        return u

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return state["mean"]
