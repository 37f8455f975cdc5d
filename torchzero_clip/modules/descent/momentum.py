"""Momentum: the running sum of updates."""

from __future__ import annotations

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
from torchzero_clip.core.private import fused


class Momentum(Transform):
    """b ← momentum · b + (1 - dampening) u;   u ← b, or u + momentum · b with nesterov

    It is that of torch.optim.SGD {identity: sgd_dampening}: the first update enters undamped.

    Args:
        momentum: How much of the sum is kept a step.
        nesterov: Look ahead.
        dampening: How much of each new update is held back.

    Example:
        >>> opt = Modular(model.parameters(), Momentum(0.9, nesterov=True), LR(0.1))
    """

    momentum: Live[float] = 0.9
    nesterov: bool = False
    dampening: Live[float] = 0.0

    pure = True

    def check(self) -> None:
        super().check()
        self.require("momentum", at_least=0, below=1)
        self.require("dampening", at_most=1)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        started = counter(param)
        return {"started": started, "momentum_buffer": zeros_like_state(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        buffer, started, dampening = state["momentum_buffer"], state["started"], group["dampening"]
        buffer.mul_(group["momentum"])
        if isinstance(dampening, Tensor) or dampening != 0:
            share = 1 - started.stack() * dampening
            buffer.add_(u.mul(share))
        else:
            buffer.add_(u)
        started.maximum_(1.0)
        return u.add_(buffer, alpha=group["momentum"]) if self.nesterov else buffer

    def fused(self, group: Group) -> FusedKernel | None:
        momentum, dampening = group["momentum"], group["dampening"]
        if isinstance(dampening, Tensor) or dampening != 0 or momentum == 0:
            return None  # torch damps the first update as well
        kernel = fused(
            "sgd", momentum=momentum, dampening=0.0, nesterov=self.nesterov,
            maximize=False, is_first_step=False,
        )  # fmt: skip
        start = lambda state: state["started"].maximum_(1.0)  # noqa: E731
        return FusedKernel(kernel, ("momentum_buffer",), advance=start, decays=False)
