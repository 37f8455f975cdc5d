"""Engines do the arithmetic of a step. Results of two engines differ only by rounding."""

from torchzero_clip.engines.compiled import Compiled
from torchzero_clip.engines.eager import AT_ONCE, Eager

__all__ = ["AT_ONCE", "Compiled", "Eager"]
