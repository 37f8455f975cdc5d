"""Rules from the gradient to the step: momentum, adaptive steps, weight decay, learning rate."""

from torchzero_clip.modules.descent.ad_ema_mix import AdEMAMix
from torchzero_clip.modules.descent.adabelief import AdaBelief
from torchzero_clip.modules.descent.adadelta import Adadelta
from torchzero_clip.modules.descent.adafactor import Adafactor
from torchzero_clip.modules.descent.adagrad import Adagrad
from torchzero_clip.modules.descent.adam import Adam
from torchzero_clip.modules.descent.adam_atan2 import AdamAtan2
from torchzero_clip.modules.descent.adamax import Adamax
from torchzero_clip.modules.descent.adan import Adan
from torchzero_clip.modules.descent.adopt import ADOPT
from torchzero_clip.modules.descent.asgd import ASGD
from torchzero_clip.modules.descent.came import CAME
from torchzero_clip.modules.descent.cautious import Cautious
from torchzero_clip.modules.descent.dadapt_adam import DAdaptAdam
from torchzero_clip.modules.descent.ema import EMA
from torchzero_clip.modules.descent.factored import Factored
from torchzero_clip.modules.descent.grams import Grams
from torchzero_clip.modules.descent.grokfast import Grokfast
from torchzero_clip.modules.descent.heads import Heads
from torchzero_clip.modules.descent.hyperball import Hyperball
from torchzero_clip.modules.descent.laprop import LaProp
from torchzero_clip.modules.descent.largest_logits import largest_logits
from torchzero_clip.modules.descent.lion import Lion
from torchzero_clip.modules.descent.lr import LR
from torchzero_clip.modules.descent.mars import Mars
from torchzero_clip.modules.descent.max_norm import MaxNorm
from torchzero_clip.modules.descent.momentum import Momentum
from torchzero_clip.modules.descent.nadam import NAdam
from torchzero_clip.modules.descent.ortho_grad import OrthoGrad
from torchzero_clip.modules.descent.prodigy import Prodigy
from torchzero_clip.modules.descent.project import Project
from torchzero_clip.modules.descent.qk_clip import QKClip
from torchzero_clip.modules.descent.radam import RAdam
from torchzero_clip.modules.descent.rmsprop import RMSprop
from torchzero_clip.modules.descent.rprop import Rprop
from torchzero_clip.modules.descent.scale import Scale
from torchzero_clip.modules.descent.stable_adam import StableAdam
from torchzero_clip.modules.descent.warmup import Warmup
from torchzero_clip.modules.descent.watch import Watch
from torchzero_clip.modules.descent.weight_decay import WeightDecay
from torchzero_clip.modules.descent.yogi import Yogi

__all__ = [
    "ADOPT",
    "ASGD",
    "CAME",
    "EMA",
    "LR",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamAtan2",
    "Adamax",
    "Adan",
    "Cautious",
    "DAdaptAdam",
    "Factored",
    "Grams",
    "Grokfast",
    "Heads",
    "Hyperball",
    "LaProp",
    "Lion",
    "Mars",
    "MaxNorm",
    "Momentum",
    "NAdam",
    "OrthoGrad",
    "Prodigy",
    "Project",
    "QKClip",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Scale",
    "StableAdam",
    "Warmup",
    "Watch",
    "WeightDecay",
    "Yogi",
    "largest_logits",
]
