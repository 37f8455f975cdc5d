"""Formats: how float32 numbers are kept in fewer bits.

A format belongs to the tensors of one list in one step. It says what is kept beside them, and has
two ways: `widen` gives the numbers of a tensor, or of some of its entries, and `store` keeps new
ones. Here that is plain torch, a tensor after the other; what a kernel does of each is in
`engines/compiled/lists/storage_formats.py`.
"""

from torchzero_clip.core.formats.exact import Exact, lower, upper, wide_of
from torchzero_clip.core.formats.kahan import Kahan
from torchzero_clip.core.formats.nearest import Nearest
from torchzero_clip.core.formats.stochastic import Stochastic

KEPT: dict[str, type[Kahan | Exact]] = {"kahan": Kahan, "exact": Exact}
"""The roundings of parameters that keep a tensor beside each, as their formats."""
ROUNDINGS = ("nearest", "stochastic", *KEPT)
__all__ = ["KEPT", "ROUNDINGS", "Exact", "Kahan", "Nearest", "Stochastic"]
__all__ += ["lower", "upper", "wide_of"]
