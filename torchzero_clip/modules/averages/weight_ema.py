"""WeightEMA: a rule that keeps a moving average of the weights, for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import Count, Share
from torchzero_clip.modules.averages.following import begun, follow


class WeightEMA(Transform):
    """Weight EMA: keeps an exponential moving average of the weights, for evaluation.

    Put it last, where the update is the step that is subtracted from the weights. The rule does not
    change the update. Inside `with opt.averaged():`, the model has the averaged weights.

    e ← decay · e + (1 - decay) (w - u), the weights for evaluation; u stays as it is

    The average e starts at the weights after the first step.

    Args:
        decay: The decay rate of the average e. Default: 0.999.
        every: Update the average every `every` steps. Default: 1.
        warmup: If True, update n of the average uses the decay min(decay, (1 + n) / (10 + n)),
            where the start is update 0. The average then follows the weights faster at first.
            Default: False.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightEMA
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), WeightEMA(0.999))
        >>> with opt.averaged():
        ...     out = model(torch.randn(64, 10))

    Reference:
        Polyak, Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control
        Optim. 30 (1992).
    """

    decay: Live[Share] = 0.999
    every: Count = 1
    warmup: bool = False

    place = "end"
    leaves = "gradient"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param), "ema": begun(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        t = state["step"].stack()
        state["step"].add_(1)
        n = torch.floor(t / self.every)
        share = torch.zeros_like(t) + (1 - group["decay"])
        if self.warmup:
            share = share.maximum(9 / (10 + n))
        share = torch.where(t > 0, share, 1.0)
        follow(state["ema"], torch.where(t % self.every == 0, share, 0.0), u, group)
        return u

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return state["ema"]
