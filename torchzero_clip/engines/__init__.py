"""Engines: how arithmetic is done. Results depend on them by rounding alone."""

from torchzero_clip.engines.compiled import Compiled
from torchzero_clip.engines.eager import Eager

__all__ = ["Compiled", "Eager"]
