"""From the gradient to the step: averages, adaptive sizes, decay, the learning rate."""

from torchzero_clip.modules.descent.ad_ema_mix import AdEMAMix
from torchzero_clip.modules.descent.adagrad import Adagrad
from torchzero_clip.modules.descent.adam import Adam
from torchzero_clip.modules.descent.cautious import Cautious
from torchzero_clip.modules.descent.ema import EMA
from torchzero_clip.modules.descent.heads import Heads
from torchzero_clip.modules.descent.hyperball import Hyperball
from torchzero_clip.modules.descent.largest_logits import largest_logits
from torchzero_clip.modules.descent.lion import Lion
from torchzero_clip.modules.descent.lr import LR
from torchzero_clip.modules.descent.mars import Mars
from torchzero_clip.modules.descent.max_norm import MaxNorm
from torchzero_clip.modules.descent.momentum import Momentum
from torchzero_clip.modules.descent.project import Project
from torchzero_clip.modules.descent.qk_clip import QKClip
from torchzero_clip.modules.descent.rmsprop import RMSprop
from torchzero_clip.modules.descent.scale import Scale
from torchzero_clip.modules.descent.stable_adam import StableAdam
from torchzero_clip.modules.descent.warmup import Warmup
from torchzero_clip.modules.descent.weight_decay import WeightDecay

__all__ = [
    "EMA",
    "LR",
    "AdEMAMix",
    "Adagrad",
    "Adam",
    "Cautious",
    "Heads",
    "Hyperball",
    "Lion",
    "Mars",
    "MaxNorm",
    "Momentum",
    "Project",
    "QKClip",
    "RMSprop",
    "Scale",
    "StableAdam",
    "Warmup",
    "WeightDecay",
    "largest_logits",
]
