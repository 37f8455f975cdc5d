"""Rules that average the weights, for evaluation or in place of a learning rate schedule."""

from torchzero_clip.modules.averages.lookahead import Lookahead
from torchzero_clip.modules.averages.schedule_free import ScheduleFree
from torchzero_clip.modules.averages.weight_average import WeightAverage
from torchzero_clip.modules.averages.weight_ema import WeightEMA

__all__ = ["Lookahead", "ScheduleFree", "WeightAverage", "WeightEMA"]
