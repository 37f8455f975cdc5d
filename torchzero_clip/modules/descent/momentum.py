"""Momentum: the running sum of updates, as in torch.optim.SGD."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.fused import Kernel, fusable, numbers_only
from torchzero_clip.core.pieces import run_kernel


class Momentum(Transform):
    """b ← momentum · b + (1 - dampening) u;   u ← b, or u + momentum · b with nesterov

    The first update enters undamped, as in torch.

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

    elementwise = True

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

    def kernel(self, u: TensorList, state: State, group: Group) -> Kernel | None:
        plain = numbers_only(group, "momentum", "dampening") and not self.nesterov
        plain = plain and group["momentum"] != 0 and group["dampening"] == 0
        if not plain or not fusable(group["params"], u, state, ["momentum_buffer"]):
            return None

        def apply(params: list[Tensor], lr: Any, decay: Any) -> None:
            state["started"].maximum_(1.0)
            if decay:
                torch._foreach_mul_(params, 1 - decay)
            fused = partial(
                torch._fused_sgd_, weight_decay=0.0, momentum=group["momentum"], lr=lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip

            def run(u: list[Tensor], p: list[Tensor], b: list[Tensor], **scale: Tensor) -> None:
                fused(p, u, b, **scale)

            run_kernel(u, run, params, [state["momentum_buffer"]], divides=True)

        return apply
