"""CAME: Adafactor with momentum, and with shorter steps if updates deviate from the momentum."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, TensorList, zeros_like_state
from torchzero_clip.core.bounds import AboveZero, Positive, Share
from torchzero_clip.modules.descent.factored import Factored

SECOND = Factored("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
INSTABILITY = Factored("exp_avg_res_row", "exp_avg_res_col")


class CAME(NormRule):
    """CAME: Adafactor with momentum, and with shorter steps if updates deviate from the momentum.

    Use it to save memory. For a matrix, the state stores V and S as averages of rows and of
    columns. Only the momentum has the size of the parameter.

    m ← β₁ m + (1 - β₁) ũ;   ũ = u / √V / max(1, RMS(u / √V) / threshold);   u ← m / √S

    V is the running average of u² + ε₁, with decay rate β₂. S is the running average of
    (ũ - m)² + ε₂, with decay rate β₃. For tensors with fewer than two dims, the state stores the
    whole V, and S is 1.

    Args:
        betas: The decay rates of the averages m, V and S. Default: (0.9, 0.999, 0.9999).
        eps: (ε₁, ε₂), the small numbers that are added to the squares. Default: (1e-30, 1e-16).
        clip_threshold: The largest RMS of the update ũ that enters m. Default: 1.0.

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
    clip_threshold: Live[AboveZero] = 1.0

    ord = "rms"
    complex = "refuse"
    leaves = "ones"
    clips = False
    has_metrics = False
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        factors = {**SECOND.init(param), **INSTABILITY.init(param)}
        return {"exp_avg": zeros_like_state(param), **factors}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        groups = [bucket.group for bucket in units.buckets]
        betas = [group["betas"] for group in groups]
        eps = [group["eps"] for group in groups]
        us = [bucket.u for bucket in units.buckets]
        SECOND.follow(units.buckets, us, [1 - beta2 for _, beta2, _ in betas], [x for x, _ in eps])
        updates = [SECOND.divide(bucket, u) for bucket, u in zip(units.buckets, us, strict=True)]
        rms = units.norms_of(updates)
        momenta: list[TensorList] = []
        residuals: list[TensorList] = []
        for bucket, u, group in zip(units.buckets, updates, groups, strict=True):
            u.div_(units.as_list(bucket, (rms / group["clip_threshold"]).clamp(min=1)))
            m = bucket.state["exp_avg"].lerp_(u, 1 - group["betas"][0])
            momenta.append(m)
            residuals.append(u.sub_(m))
        weights = [1 - beta3 for _, _, beta3 in betas]
        INSTABILITY.follow(units.buckets, residuals, weights, [x for _, x in eps])
        for bucket, m in zip(units.buckets, momenta, strict=True):
            bucket.u = INSTABILITY.divide(bucket, m)
        return buckets
