"""Limits that past norms set."""

from torchzero_clip.modules.adaptive.ada_gc import AdaGC
from torchzero_clip.modules.adaptive.adaptive_clip import AdaptiveClip
from torchzero_clip.modules.adaptive.agc import AGC
from torchzero_clip.modules.adaptive.auto_clip import AutoClip
from torchzero_clip.modules.adaptive.criterion import (
    Criterion,
    max_clipping,
    mean_clipping,
    reciprocal_clipping,
)
from torchzero_clip.modules.adaptive.ema_ratio import EMARatio
from torchzero_clip.modules.adaptive.quantile import EMAQuantile, P2Quantile, Quantile
from torchzero_clip.modules.adaptive.spike_clip import SpikeClip
from torchzero_clip.modules.adaptive.trust_ratio import TrustRatio
from torchzero_clip.modules.adaptive.z_clip import ZClip
from torchzero_clip.modules.adaptive.z_score_clip import ZScoreClip
from torchzero_clip.modules.adaptive.z_stat import ZStat

__all__ = [
    "AGC",
    "AdaGC",
    "AdaptiveClip",
    "AutoClip",
    "Criterion",
    "EMAQuantile",
    "EMARatio",
    "P2Quantile",
    "Quantile",
    "SpikeClip",
    "TrustRatio",
    "ZClip",
    "ZScoreClip",
    "ZStat",
    "max_clipping",
    "mean_clipping",
    "reciprocal_clipping",
]
