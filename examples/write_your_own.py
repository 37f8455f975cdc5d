"""Two custom rules: one about tensors, one about norms.

python examples/write_your_own.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip import (
    LR,
    Group,
    Live,
    Modular,
    Momentum,
    NormRule,
    Scope,
    State,
    TensorList,
    Transform,
    UnitState,
    zeros_like_state,
)


class SlowBoost(Transform):
    """m ← β m + (1 - β) u, at first u;   u ← u + gain · m   (arXiv 2405.20233)"""

    beta: Live[float] = 0.98
    gain: Live[float] = 2.0

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"slow": zeros_like_state(param).fill_(torch.inf)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        slow = state["slow"]
        slow.copy_(u.where(slow.isinf(), slow)).lerp_(u, 1 - group["beta"])
        return u.add_(slow, alpha=group["gain"])


class ClipToAverage(NormRule):
    """u ← u · min(1, factor · a / ‖u‖);   a ← (a + c) / 2, c the clipped norm; at first a ← c"""

    factor: Live[float] = 2.0
    dim: Scope = None

    def init_unit(self) -> dict[str, float]:
        return {"average": torch.inf}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        return state["average"].mul(group["factor"])

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        average = state["average"]
        return {"average": torch.where(average.isinf(), clipped, (average + clipped) / 2)}


def main(steps: int = 300) -> Tensor:
    """Fit a line through data with a wild label every fiftieth time. Return slope and offset."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64)
    truth = 3 * x - 1
    line = torch.zeros(2, requires_grad=True)
    opt = Modular([line], ClipToAverage(dim="global"), SlowBoost(gain=0.5), Momentum(0.5), LR(0.05))
    for step in range(1, steps + 1):
        label = truth + (1000 if step % 50 == 0 else 0)
        opt.zero_grad()
        (line[0] * x + line[1] - label).square().mean().backward()
        opt.step()
        if step % 25 == 0:
            slope, offset = line.tolist()
            loss = (slope * x + offset - truth).square().mean().item()
            wild = "   after a wild label" if step % 50 == 0 else ""
            print(f"step {step:3}   loss {loss:9.6f}   line {slope:.4f} x {offset:+.4f}{wild}")
    return line.detach()


if __name__ == "__main__":
    main()
