"""Methods that people know by name, each a chain of links."""

from torchzero_clip.published import (
    averages,
    classic,
    evaluation,
    guarded,
    large_batch,
    matrices,
    rate_free,
    relatives,
    signs,
)
from torchzero_clip.published.name import NAMES, instead_of, links_of, named, published

__all__ = [
    "NAMES",
    "averages",
    "classic",
    "evaluation",
    "guarded",
    "instead_of",
    "large_batch",
    "links_of",
    "matrices",
    "named",
    "published",
    "rate_free",
    "relatives",
    "signs",
]
