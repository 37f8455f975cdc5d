"""Heads: which rows of a parameter are heads of attention, and how large their logits were."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import wide


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


def row_factors(found: Any, shape: tuple[int, ...], tau: float, alpha: float, name: str) -> Tensor:
    """What each row of a parameter with these heads is multiplied by."""
    heads = [found] if hasattr(found, "role") else list(found)
    parts, end = [], 0
    for some in sorted(heads, key=lambda some: some.rows or (0, shape[0])):
        start, stop = some.rows or (0, shape[0])
        factors = head_factors(some, stop - start, tau, alpha, name)
        parts += [factors.new_ones(start - end), factors]
        end = stop
    factor = torch.cat([*parts, parts[-1].new_ones(shape[0] - end)])
    return factor.view(-1, *[1] * (len(shape) - 1))


def head_factors(some: Any, rows: int, tau: float, alpha: float, name: str) -> Tensor:
    """What each of the rows of some heads is multiplied by."""
    maxima = some.maxima.detach().to(wide(some.maxima.device))
    count = maxima.numel()
    size = rows // max(count, 1)
    if maxima.dim() != 1 or size * count != rows or not 0 <= some.last <= size:
        raise ValueError(
            "QKClip: maxima must be a vector with a number for each head, a count that "
            f"divides the {rows} rows of {name!r}, and last at most the rows of a head, "
            f"got shape {tuple(maxima.shape)} and last={some.last}"
        )
    if some.role not in ("query", "key"):
        raise ValueError(f"QKClip: role must be 'query' or 'key', got {some.role!r}")
    known = (maxima > 0) & torch.isfinite(maxima)
    gamma = (tau / torch.where(known, maxima, tau)).clamp(max=1)
    main = gamma ** (alpha if some.role == "query" else 1 - alpha)
    rest = gamma if some.role == "query" else torch.ones_like(gamma)
    parts = [main.unsqueeze(1).expand(-1, size - some.last)]
    return torch.cat([*parts, rest.unsqueeze(1).expand(-1, some.last)], dim=1).flatten()


def shrunk(
    found: Any, w: Tensor, u: Tensor, tau: float, alpha: float, name: str = "", layout: Any = None
) -> Tensor:
    """The step that ends at (w - u) · factor; where that is 1, the step u itself."""
    if not found:
        return u
    shape = tuple(w.shape if layout is None else layout.shape)
    factor = row_factors(found, shape, tau, alpha, name)
    factor = (factor if layout is None else layout.part(factor)).to(u.dtype)
    w = w.to(u.dtype)
    return torch.where(factor == 1, u, w - factor * (w - u))
