"""EMA: an exponential moving average of the updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import Share
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.modules.descent.momentum import BUFFER, averages_its_buffer


class EMA(Transform, Smoothing):
    """Exponential moving average of the updates: a momentum that averages instead of summing.

    Use it before `Sign` (Signum) or `Orthogonalize` (Muon). For the momentum of SGD, which is a
    sum, use `Momentum`.

    m ← β m + (1 - β) u;   u ← m, or m / (1 - βᵗ) with debias, or (1 - β) u + β m with nesterov

    Args:
        beta: The decay rate of the average m. Default: 0.9.
        debias: If True, apply bias correction to the average, as `Adam` does. Default: False.
        nesterov: If True, look ahead by one step, as Muon does. You cannot combine it with
            `debias`. Default: False.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, Sign
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), EMA(0.9), Sign(), LR(1e-4))
    """

    beta: Live[Share] = 0.9
    debias: bool = False
    nesterov: bool = False

    state_kinds = {"ema": "linear"}
    torch_names = {"momentum": "beta"}
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        if self.debias and self.nesterov:
            raise ValueError(
                "EMA: debias=True and nesterov=True cannot be combined: pass only one of "
                "these two arguments"
            )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        step = {"step": counter(param)} if self.debias else {}
        return {**step, "ema": zeros_like_state(param)}

    def adopted(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        if state.get(BUFFER) is None:
            return {}
        if not averages_its_buffer(group):
            raise ValueError(
                f"{BUFFER} in the checkpoint is a sum of gradients, but EMA needs an average: use "
                "Momentum instead of EMA"
            )
        if self.debias:
            raise ValueError(
                "EMA with debias=True needs a step count, but the checkpoint has no step "
                "count: pass debias=False to EMA"
            )
        return {"ema": state[BUFFER]}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        m = state["ema"].lerp_(u, 1 - group["beta"])
        if self.nesterov:
            return u.lerp_(m, group["beta"])
        if not self.debias:
            return m
        t = state["step"].add_(1).stack()
        return u.copy_(m).div_(1 - group["beta"] ** t)
