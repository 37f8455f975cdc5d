"""Published methods, such as AdamW and Muon. Each function returns a method as a chain of links."""

from torchzero_clip.published import (
    adamw_averages,
    classic,
    evaluation,
    guarded,
    large_batch,
    matrix_methods,
    per_head,
    rate_free,
    relatives,
    signs,
)
from torchzero_clip.published.name import NAMES, instead_of, links_of, named, published

__all__ = [
    "NAMES",
    "adamw_averages",
    "classic",
    "evaluation",
    "guarded",
    "instead_of",
    "large_batch",
    "links_of",
    "matrix_methods",
    "named",
    "per_head",
    "published",
    "rate_free",
    "relatives",
    "signs",
]
