"""Heads: the rows of a parameter that are attention heads, and the largest logits of the heads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import wide


class Heads(NamedTuple):
    """The rows of a weight or bias that make queries or keys, one head after another, for `QKClip`.

    Attributes:
        role: The result of the rows, "query" or "key".
        maxima: A vector with the largest logit of each head in this step, on the device. If several
            heads of queries share one head of keys, it has one element per head of keys, and the
            rows of these queries must follow each other.
        last: The number of rows at the end of each head that are something else, as in latent
            attention. For queries, these are the rows with the position, which meet a key that all
            heads share; they are multiplied by the whole factor. For keys, they are the values,
            which do not change.
        rows: The first row and the row after the last one, if the parameter also has other rows.
    """

    role: Literal["query", "key"]
    maxima: Tensor
    last: int = 0
    rows: tuple[int, int] | None = None


def row_factors(heads: Any, shape: tuple[int, ...], tau: float, alpha: float, name: str) -> Tensor:
    """Return the factor of each row of a parameter with these heads."""
    sections = [heads] if hasattr(heads, "role") else list(heads)
    parts: list[Tensor] = []
    end = 0
    for section in sorted(sections, key=lambda section: section.rows or (0, shape[0])):
        start, stop = section.rows or (0, shape[0])
        factors = head_factors(section, stop - start, tau, alpha, name)
        parts += [factors.new_ones(start - end), factors]
        end = stop
    factor = torch.cat([*parts, parts[-1].new_ones(shape[0] - end)])
    return factor.view(-1, *[1] * (len(shape) - 1))


def head_factors(heads: Any, rows: int, tau: float, alpha: float, name: str) -> Tensor:
    """Return the factors of the rows of some heads."""
    maxima = heads.maxima.detach().to(wide(heads.maxima.device))
    count = maxima.numel()
    size = rows // max(count, 1)
    if maxima.dim() != 1 or size * count != rows or not 0 <= heads.last <= size:
        raise ValueError(
            "QKClip: maxima must be a vector with one number per head, the number of heads must "
            f"divide the {rows} rows of {name!r}, and last must be at most the rows of one head, "
            f"got shape {tuple(maxima.shape)} and last={heads.last}"
        )
    if heads.role not in ("query", "key"):
        raise ValueError(f"QKClip: role must be 'query' or 'key', got {heads.role!r}")
    usable = (maxima > 0) & torch.isfinite(maxima)
    gamma = (tau / torch.where(usable, maxima, tau)).clamp(max=1)
    if heads.role == "query":
        main_factor = gamma**alpha
        last_factor = gamma
    else:
        main_factor = gamma ** (1 - alpha)
        last_factor = torch.ones_like(gamma)
    main_rows = main_factor.unsqueeze(1).expand(-1, size - heads.last)
    last_rows = last_factor.unsqueeze(1).expand(-1, heads.last)
    return torch.cat([main_rows, last_rows], dim=1).flatten()


def shrunk(
    heads: Any, w: Tensor, u: Tensor, tau: float, alpha: float, name: str = "", layout: Any = None
) -> Tensor:
    """Return the step that ends at (w - u) · factor, or u itself if the factor is 1."""
    if not heads:
        return u
    shape = tuple(w.shape if layout is None else layout.shape)
    factor = row_factors(heads, shape, tau, alpha, name)
    factor = (factor if layout is None else layout.part(factor)).to(u.dtype)
    w = w.to(u.dtype)
    return torch.where(factor == 1, u, w - factor * (w - u))
