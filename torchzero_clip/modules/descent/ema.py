"""EMA: an exponential moving average of the updates."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state


class EMA(Transform):
    """m ← β m + (1 - β) u;   u ← m, or m / (1 - βᵗ) with debias

    Args:
        beta: How much of the average is kept a step.
        debias: Undo the start at zero.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Sign
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), EMA(0.9), Sign(), LR(1e-4))
    """

    beta: Live[float] = 0.9
    debias: bool = False

    def check(self) -> None:
        super().check()
        self.require("beta", at_least=0, below=1)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        step = {"step": counter(param)} if self.debias else {}
        return {**step, "ema": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        m = state["ema"].lerp_(u, 1 - group["beta"])
        if not self.debias:
            return m
        t = state["step"].add_(1).stack()
        return u.copy_(m).div_(1 - group["beta"] ** t)
