"""Lookahead: a rule that returns the weights to slow weights every `k` steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter
from torchzero_clip.core.bounds import Count, Fraction
from torchzero_clip.modules.averages.following import begun, follow


class Lookahead(Transform):
    """Lookahead: keeps slow weights that follow the weights, and returns to them every `k` steps.

    Use it to stabilize another optimizer. Put it after `LR`, where the update is the step that is
    subtracted from the weights.

    φ ← φ + alpha (w - u - φ), and w ← φ, in every k-th step

    Here φ are the slow weights, and w are the weights of the model. Inside `with opt.averaged():`,
    the model has the slow weights.

    Args:
        k: The number of steps between two returns to the slow weights. Default: 6.
        alpha: The step size of φ: 0 keeps the slow weights, 1 replaces them by the current weights.
            Default: 0.5.
        start: The first slow weights: "weights" for the weights before the first step, as in the
            paper, or "sync" for the weights after the k-th step, as in timm. With "sync" the k-th
            step does not change the weights. Default: "weights".

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
        t = state["step"].add_(1).stack()
        slow = state["slow"]
        sync = t % self.k == 0
        share = torch.where(sync, torch.zeros_like(t) + group["alpha"], 0.0)
        if self.start == "sync":  # up to the k-th step, φ is equal to the fast weights
            share = torch.where(t <= self.k, 1.0, share)
            sync = sync & (t > self.k)
        follow(slow, share, u, group)
        back = sync.to(t.dtype)
        return u.mul_(1 - back).add_(group["params"], alpha=back).add_(slow, alpha=-back)

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return state["slow"]
