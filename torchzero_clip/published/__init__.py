"""Methods that people know by name, each a chain of links."""

from torchzero_clip.published import averages, classic, guarded, large_batch, matrices, signs
from torchzero_clip.published.name import NAMES, links_of, named, published

__all__ = [
    "NAMES",
    "averages",
    "classic",
    "guarded",
    "large_batch",
    "links_of",
    "matrices",
    "named",
    "published",
    "signs",
]
