"""CAME: Adafactor with momentum, which is trusted less where updates are far from it."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, TensorList, zeros_like_state
from torchzero_clip.core.bounds import Positive, Share
from torchzero_clip.modules.descent.factored import Factored

SECOND = Factored("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
DOUBT = Factored("exp_avg_res_row", "exp_avg_res_col")


class CAME(NormRule):
    """m ← β₁ m + (1 - β₁) ũ;   ũ = u / √V / max(1, RMS(u / √V) / threshold);   u ← m / √S

    V is the average of u² + ε₁ with β₂, S that of (ũ - m)² + ε₂ with β₃, both kept as the averages
    of rows and of columns. For tensors of fewer than two dims V is kept whole, and S is 1.

    Args:
        betas: How much of m, of V and of S is kept a step.
        eps: (ε₁, ε₂), which are added to the squares.
        clip_threshold: The largest RMS of what enters m.

    Example:
        >>> import torch
        >>> from torchzero_clip import CAME, LR, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), CAME(), WeightDecay(0.01), LR(2e-4))

    Reference:
        Luo et al., "CAME: confidence-guided adaptive memory efficient optimization",
        arXiv 2307.02047.
    """

    betas: Live[tuple[Share, Share, Share]] = (0.9, 0.999, 0.9999)
    eps: Live[tuple[Positive, Positive]] = (1e-30, 1e-16)
    clip_threshold: Live[Positive] = 1.0

    ord = "rms"
    complex = "refuse"
    leaves = "ones"
    clips = False
    has_metrics = False
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like_state(param), **SECOND.init(param), **DOUBT.init(param)}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        groups = [bucket.group for bucket in units.buckets]
        betas, eps = [group["betas"] for group in groups], [group["eps"] for group in groups]
        us = [bucket.u for bucket in units.buckets]
        SECOND.follow(units.buckets, us, [1 - beta2 for _, beta2, _ in betas], [x for x, _ in eps])
        updates = [SECOND.divide(bucket, u) for bucket, u in zip(units.buckets, us, strict=True)]
        rms = units.norms_of(updates)
        means: list[TensorList] = []
        rest: list[TensorList] = []
        for bucket, u, group in zip(units.buckets, updates, groups, strict=True):
            u.div_(units.as_list(bucket, (rms / group["clip_threshold"]).clamp(min=1)))
            means.append(bucket.state["exp_avg"].lerp_(u, 1 - group["betas"][0]))
            rest.append(u.sub_(means[-1]))
        DOUBT.follow(units.buckets, rest, [1 - beta3 for _, _, beta3 in betas], [x for _, x in eps])
        for bucket, m in zip(units.buckets, means, strict=True):
            bucket.u = DOUBT.divide(bucket, m)
        return buckets
