"""Rules that act only on some parameters or in some steps: masks, partitions and guards."""

from torchzero_clip.modules.flow.accumulate import Accumulate
from torchzero_clip.modules.flow.carry import Carry
from torchzero_clip.modules.flow.freeze import Freeze
from torchzero_clip.modules.flow.graft import Graft
from torchzero_clip.modules.flow.guard import Guard
from torchzero_clip.modules.flow.identity import Identity
from torchzero_clip.modules.flow.lambda_ import Lambda
from torchzero_clip.modules.flow.masked import Masked
from torchzero_clip.modules.flow.matrices_and_rest import matrices_and_rest
from torchzero_clip.modules.flow.noise import Noise
from torchzero_clip.modules.flow.parallel import Parallel
from torchzero_clip.modules.flow.partition import Partition
from torchzero_clip.modules.flow.reset import Reset
from torchzero_clip.modules.flow.skip_large import SkipLarge
from torchzero_clip.modules.flow.skip_spike import SkipSpike
from torchzero_clip.modules.flow.steepest import Steepest
from torchzero_clip.modules.flow.when import When

__all__ = [
    "Accumulate",
    "Carry",
    "Freeze",
    "Graft",
    "Guard",
    "Identity",
    "Lambda",
    "Masked",
    "Noise",
    "Parallel",
    "Partition",
    "Reset",
    "SkipLarge",
    "SkipSpike",
    "Steepest",
    "When",
    "matrices_and_rest",
]
