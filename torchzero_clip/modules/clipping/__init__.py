"""Rules that limit or set the values and norms of an update. Some limits follow past updates."""

from torchzero_clip.modules.clipping.centralize import Centralize
from torchzero_clip.modules.clipping.clip_norm import ClipNorm
from torchzero_clip.modules.clipping.clip_norm_by_ema import ClipNormByEMA
from torchzero_clip.modules.clipping.clip_norm_growth import ClipNormGrowth
from torchzero_clip.modules.clipping.clip_percentile import ClipPercentile
from torchzero_clip.modules.clipping.clip_rms import ClipRMS
from torchzero_clip.modules.clipping.clip_value import ClipValue
from torchzero_clip.modules.clipping.clip_value_by_ema import ClipValueByEMA
from torchzero_clip.modules.clipping.clip_value_growth import ClipValueGrowth
from torchzero_clip.modules.clipping.delta_clip import DeltaClip
from torchzero_clip.modules.clipping.nan_to_num import NanToNum
from torchzero_clip.modules.clipping.normalize import Normalize
from torchzero_clip.modules.clipping.normalize_by_ema import NormalizeByEMA
from torchzero_clip.modules.clipping.sign import Sign
from torchzero_clip.modules.clipping.soft_clip import SoftClip
from torchzero_clip.modules.clipping.standardize import Standardize

__all__ = [
    "Centralize",
    "ClipNorm",
    "ClipNormByEMA",
    "ClipNormGrowth",
    "ClipPercentile",
    "ClipRMS",
    "ClipValue",
    "ClipValueByEMA",
    "ClipValueGrowth",
    "DeltaClip",
    "NanToNum",
    "Normalize",
    "NormalizeByEMA",
    "Sign",
    "SoftClip",
    "Standardize",
]
