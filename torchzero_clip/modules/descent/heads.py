"""Heads: which rows of a parameter are heads of attention, and how large their logits were."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensors import wide


class Heads(NamedTuple):
    """The rows of a weight or bias that make queries or keys, one head after another.

    Attributes:
        role: What they make, "query" or "key".
        maxima: The largest logit of each head in this step, as a vector on the device. Where
            queries share keys, of each head of keys, and the rows of its queries follow each other.
        last: The last rows of each head that are something else, as in latent attention: of queries
            those that carry the position and meet a key of all heads, which shrink by all of the
            factor; of keys the values, which stay.
        rows: The first of these rows and the one after the last, where the parameter has others.
    """

    role: Literal["query", "key"]
    maxima: Tensor
    last: int = 0
    rows: tuple[int, int] | None = None


def row_factors(heads: Heads, rows: int, group: dict[str, Any], name: str) -> Tensor:
    """What each of the rows of some heads is multiplied by."""
    maxima = heads.maxima.detach().to(wide(heads.maxima.device))
    count = maxima.numel()
    size = rows // max(count, 1)
    if maxima.dim() != 1 or size * count != rows or not 0 <= heads.last <= size:
        raise ValueError(
            "QKClip: maxima must be a vector with a number for each head, a count that "
            f"divides the {rows} rows of {name!r}, and last at most the rows of a head, got "
            f"shape {tuple(maxima.shape)} and last={heads.last}"
        )
    if heads.role not in ("query", "key"):
        raise ValueError(f"QKClip: role must be 'query' or 'key', got {heads.role!r}")
    known = (maxima > 0) & torch.isfinite(maxima)
    gamma = (group["tau"] / torch.where(known, maxima, group["tau"])).clamp(max=1)
    query, alpha = heads.role == "query", group["alpha"]
    main = gamma ** (alpha if query else 1 - alpha)
    rest = gamma if query else torch.ones_like(gamma)
    parts = [main.unsqueeze(1).expand(-1, size - heads.last)]
    return torch.cat([*parts, rest.unsqueeze(1).expand(-1, heads.last)], dim=1).flatten()
