"""The class `Modular`, with parameter groups, saving, loading and reports."""

from torchzero_clip.optimizer.capturing import captured
from torchzero_clip.optimizer.modular import Modular
from torchzero_clip.optimizer.takeover import take_over

__all__ = ["Modular", "captured", "take_over"]
