"""SpikeClip: a rule that limits elements that are far above their usual size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, counter, zeros_like_state
from torchzero_clip.core.bounds import AboveZero, Count, Share, Whole


class SpikeClip(Transform):
    """Spike-aware clipping: limits elements that are far above the root of their average square.

    Use it before `Adam`. The paper's method SPAM is `SpikeClip` and `Adam` inside `Reset`.

    u ← sign(u) · min(|u|, √(θ v));   v ← β v + (1 - β) u²

    Here v is a running average of the square of each element, measured after clipping. As long as v
    is zero, the element has no limit. If an element is NaN or infinite, the v of the element does
    not change.

    Args:
        threshold: θ, the largest ratio of the square of an element to v. Default: 5000.0.
        beta: The decay rate of the average v. None uses the second value of `betas` of the nearest
            link that has `betas`, such as `Adam`. Default: 0.999.
        wait: The first step in which the rule clips. Each parameter counts its own steps, from 1.
            In earlier steps the rule only updates v. Default: 0.
        every: If not None, the count for `wait` restarts at 0 in each step whose number is a
            multiple of `every`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SpikeClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SpikeClip(), Adam(), LR(1e-3))

    Reference:
        Huang et al., "SPAM: spike-aware Adam with momentum reset for stable LLM training",
        arXiv 2501.06842.
    """

    threshold: Live[AboveZero] = 5000.0
    beta: Live[Share | None] = 0.999
    wait: Whole = 0
    every: Count | None = None

    borrows = (("beta", "betas", 1),)
    complex = "refuse"
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        step = {"step": counter(param)} if self.wait else {}
        return {**step, "rms": zeros_like_state(param)}  # √v, because squares could overflow

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        rms = state["rms"]
        finite = u.isfinite()
        beta = group["beta"]
        bound = rms.mul(group["threshold"] ** 0.5).where(rms.positive(), math.inf)
        if self.wait:
            t = state["step"].add_(1).stack()
            since = t if self.every is None else t % self.every
            bound.add_(torch.where(since < self.wait, torch.inf, 0.0))
        u = u.minimum_(bound).maximum_(bound.neg())
        after = rms.mul(beta**0.5).hypot(u.mul((1 - beta) ** 0.5))
        rms.copy_(after.where(finite, rms))
        return u
