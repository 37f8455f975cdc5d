"""Engines: how arithmetic is done. Results depend on them by rounding alone."""

from torchzero_clip.engines.compiled import Compiled
from torchzero_clip.engines.eager import AT_ONCE, Eager

__all__ = ["AT_ONCE", "Compiled", "Eager"]
