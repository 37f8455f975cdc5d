"""SpikeClip: entries far above their own second moment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import Count, Positive, Share, Whole


class SpikeClip(Transform):
    """u ← sign(u) · min(|u|, √(θ v));   v ← β v + (1 - β) u²

    An entry whose v is still zero has no bound. A NaN or an infinity leaves its v alone.

    Args:
        threshold: θ, how far above its average square an entry's square may be.
        beta: How much of v is kept a step; None as the second of `betas` of the nearest link that
            has some, as `Adam`.
        wait: Nothing is cut before the step of this number, while v observes all that comes; each
            parameter counts its own, from 1.
        every: It waits anew from each step whose number this divides, which then counts as 0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SpikeClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SpikeClip(), Adam(), LR(1e-3))

    Reference:
        Huang et al., "SPAM: spike-aware Adam with momentum reset for stable LLM training",
        arXiv 2501.06842.
    """

    threshold: Live[Positive] = 5000.0
    beta: Live[Share | None] = 0.999
    wait: Whole = 0
    every: Count | None = None

    borrows = (("beta", "betas", 1),)
    complex = "refuse"
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        step = {"step": counter(param)} if self.wait else {}
        return {**step, "rms": zeros_like_state(param)}  # √v, whose range is that of u

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        rms, finite, beta = state["rms"], u.isfinite(), group["beta"]
        bound = rms.mul(group["threshold"] ** 0.5).where(rms.positive(), math.inf)
        if self.wait:
            t = state["step"].add_(1).stack()
            since = t if self.every is None else t % self.every
            bound.add_(torch.where(since < self.wait, torch.inf, 0.0))
        u = u.minimum_(bound).maximum_(bound.neg())
        after = rms.mul(beta**0.5).hypot(u.mul((1 - beta) ** 0.5))
        rms.copy_(after.where(finite, rms))
        return u
