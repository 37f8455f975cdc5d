"""Momentum: a running sum of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import (
    FusedKernel,
    Group,
    Live,
    State,
    TensorList,
    Transform,
    counter,
    zeros_like_state,
)
from torchzero_clip.core.bounds import NonNegative, Within
from torchzero_clip.core.torch_private import fused
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.core.user_warnings import warn

BUFFER = "momentum_buffer"
"""The name of the momentum in the state of `torch.optim.SGD` and `torch.optim.Muon`."""


def averages_its_buffer(group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer of torch stores an average (Muon) instead of a sum (SGD)."""
    return "ns_coefficients" in group


class Momentum(Transform, Smoothing):
    """Momentum: a running sum of the updates, in which old updates decay.

    Use it with `LR` for SGD with momentum. The rule does the same as the momentum of
    torch.optim.SGD (tested against torch). As in torch, dampening does not act on the first update.

    b ← momentum · b + (1 - dampening) u;   u ← b, or u + momentum · b with nesterov

    Args:
        momentum: The factor of the old sum b in each step. With a value of 1 or more, old updates
            never decay, and the rule warns. Default: 0.9.
        nesterov: If True, use Nesterov momentum, which looks ahead by one step. Default: False.
        dampening: The fraction of each new update that is left out of the sum. Default: 0.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Momentum(0.9, nesterov=True), LR(0.1))
    """

    momentum: Live[NonNegative] = 0.9
    nesterov: bool = False
    dampening: Live[Annotated[float, Within(above=-math.inf, at_most=1)]] = 0.0

    state_kinds = {"momentum_buffer": "linear"}
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        check_momentum(self)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"started": counter(param), "momentum_buffer": zeros_like_state(param)}

    def adopted(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> Mapping[str, Any]:
        if BUFFER in state and averages_its_buffer(group):
            raise ValueError(
                f"{BUFFER} in the checkpoint is an average of gradients, but Momentum needs a "
                "sum: use EMA instead of Momentum"
            )
        if state.get(BUFFER) is None:
            return {}
        return {**state, "started": 1.0}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        buffer = state["momentum_buffer"]
        started = state["started"]
        dampening = group["dampening"]
        buffer.mul_(group["momentum"])
        if isinstance(dampening, Tensor) or dampening != 0:
            share = 1 - started.stack() * dampening
            buffer.add_(u.mul(share))
        else:
            buffer.add_(u)
        started.maximum_(1.0)
        return u.add_(buffer, alpha=group["momentum"]) if self.nesterov else buffer

    def fused(self, group: Group) -> FusedKernel | None:
        momentum = group["momentum"]
        dampening = group["dampening"]
        if isinstance(dampening, Tensor) or dampening != 0 or momentum == 0:
            return None  # the kernel of torch also damps the first update
        kernel = fused(
            "sgd", momentum=momentum, dampening=0.0, nesterov=self.nesterov,
            maximize=False, is_first_step=False,
        )  # fmt: skip
        start = lambda state: state["started"].maximum_(1.0)  # noqa: E731
        return FusedKernel(kernel, ("momentum_buffer",), advance=start, decays=False)


def check_momentum(rule: Transform) -> None:
    """Warn if `momentum` is 1 or more, which torch accepts."""
    value = vars(rule)["momentum"]
    if isinstance(value, Tensor) and (value.device.type != "cpu" or torch.compiler.is_compiling()):
        return  # reading the value would synchronize with the device
    if value >= 1:
        name = type(rule).__name__
        grows = "never decays" if value == 1 else "grows without limit"
        warn(
            f"{name}: momentum should be below 1, such as 0.9, got {value!r}. With this momentum, "
            f"the sum of past updates {grows}",
        )
