"""Formats: how the optimizer stores float32 values in fewer bits.

A format object belongs to the tensors of one list in one step. `widen` returns the float32 values
of a tensor, or of some of its elements, and `store` stores new values. Some formats store a second
tensor next to each tensor. The formats here are plain torch code that handles one tensor after
another. `engines/compiled/lists/storage_formats.py` describes what a kernel does for each format.
"""

from torchzero_clip.core.formats.exact import Exact, lower, upper, wide_of
from torchzero_clip.core.formats.kahan import Kahan
from torchzero_clip.core.formats.nearest import Nearest
from torchzero_clip.core.formats.stochastic import Stochastic

KEPT: dict[str, type[Kahan | Exact]] = {"kahan": Kahan, "exact": Exact}
"""The values of `rounding` that store a tensor next to each parameter, and their formats."""
ROUNDINGS = ("nearest", "stochastic", *KEPT)
"""The values of `rounding`."""
__all__ = [
    "KEPT",
    "ROUNDINGS",
    "Exact",
    "Kahan",
    "Nearest",
    "Stochastic",
    "lower",
    "upper",
    "wide_of",
]
