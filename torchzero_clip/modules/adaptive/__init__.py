"""Rules that compute their limits from past norms."""

from torchzero_clip.modules.adaptive.ac_clip import ACClip
from torchzero_clip.modules.adaptive.ada_clip import AdaClip
from torchzero_clip.modules.adaptive.ada_gc import AdaGC
from torchzero_clip.modules.adaptive.ada_gn import AdaGN
from torchzero_clip.modules.adaptive.adaptive_clip import AdaptiveClip
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.agc import AGC
from torchzero_clip.modules.adaptive.auto_clip import AutoClip
from torchzero_clip.modules.adaptive.clippy import Clippy
from torchzero_clip.modules.adaptive.criterion import (
    Criterion,
    max_clipping,
    mean_clipping,
    reciprocal_clipping,
)
from torchzero_clip.modules.adaptive.ema_quantile import EMAQuantile
from torchzero_clip.modules.adaptive.ema_ratio import EMARatio
from torchzero_clip.modules.adaptive.geometric_quantile import GeometricQuantile
from torchzero_clip.modules.adaptive.p2_quantile import P2Quantile
from torchzero_clip.modules.adaptive.quantile import Quantile
from torchzero_clip.modules.adaptive.spike_clip import SpikeClip
from torchzero_clip.modules.adaptive.trust_ratio import TrustRatio
from torchzero_clip.modules.adaptive.z_clip import ZClip
from torchzero_clip.modules.adaptive.z_score_clip import ZScoreClip
from torchzero_clip.modules.adaptive.z_stat import ZStat

__all__ = [
    "AGC",
    "ACClip",
    "AdaClip",
    "AdaGC",
    "AdaGN",
    "AdaptiveClip",
    "AdaptiveRule",
    "AutoClip",
    "Clippy",
    "Criterion",
    "EMAQuantile",
    "EMARatio",
    "GeometricQuantile",
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
