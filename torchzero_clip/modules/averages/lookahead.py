"""Lookahead: fast weights that are drawn back to slow ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import Count, Fraction
from torchzero_clip.modules.averages.following import begun, follow


class Lookahead(Transform):
    """φ ← φ + alpha (w - u - φ), and w ← φ, in every k-th step

    Put it behind LR, where the update is the step that is subtracted. φ are the weights for
    evaluation, which `with opt.averaged():` has in the place of the fast ones.

    Args:
        k: The steps from one look ahead to the next.
        alpha: How far φ moves towards the fast weights.
        start: "weights": φ begins as the weights before the first step, as in the paper; "sync": as
            those after the k-th, which stay, as in timm.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Lookahead, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), LR(1e-3), Lookahead())

    Reference:
        Zhang et al., "Lookahead optimizer: k steps forward, 1 step back", arXiv 1907.08610.
    """

    k: Count = 6
    alpha: Live[Fraction] = 0.5
    start: Literal["weights", "sync"] = "weights"

    place = "end"
    pure = True
    per_entry = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"step": counter(param), "slow": begun(param)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        t, slow = state["step"].add_(1).stack(), state["slow"]
        sync = t % self.k == 0
        share = torch.where(sync, torch.zeros_like(t) + group["alpha"], 0.0)
        if self.start == "sync":  # until then φ is the fast weights
            share, sync = torch.where(t <= self.k, 1.0, share), sync & (t > self.k)
        follow(slow, share, u, group)
        back = sync.to(t.dtype)
        return u.mul_(1 - back).add_(group["params"], alpha=back).add_(slow, alpha=-back)

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return state["slow"]
