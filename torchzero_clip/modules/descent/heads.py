"""Heads: a description of the rows of a parameter that are attention heads, for `QKClip`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import wide


class Heads(NamedTuple):
    """A description of the heads in a weight or bias that makes queries or keys, for `QKClip`.

    Attributes:
        role: What the rows make: "query" or "key".
        maxima: A vector on the device with the largest logit of each head in this step. If several
            heads of queries share one head of keys, the vector has one element per head of keys.
            The rows of these queries must then be next to each other.
        last: The number of rows at the end of each head that are not ordinary query or key rows, as
            in latent attention. For queries, these rows hold the position. All heads share one key
            for the position, so `QKClip` multiplies these query rows by the whole factor γ. For
            keys, these rows are the values, and `QKClip` does not change them.
        rows: The range of the rows, if the parameter also has other rows: the first row, and the
            row after the last row.
    """

    role: Literal["query", "key"]
    maxima: Tensor
    last: int = 0
    rows: tuple[int, int] | None = None


def row_factors(
    heads: Any,
    shape: tuple[int, ...],
    tau: float,
    alpha: float,
    name: str,
) -> Tensor:
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
    """Return the factor of each row that belongs to these heads."""
    maxima = heads.maxima.detach().to(wide(heads.maxima.device))
    count = maxima.numel()
    size = rows // max(count, 1)
    if maxima.dim() != 1 or size * count != rows or not 0 <= heads.last <= size:
        raise ValueError(
            f"QKClip: the maxima for {name!r} must be a vector with one element per head, the "
            f"number of heads must divide the {rows} rows of {name!r}, and last= must be at most "
            f"the number of rows per head, got maxima of shape {tuple(maxima.shape)} and "
            f"last={heads.last}"
        )
    if heads.role not in ("query", "key"):
        raise ValueError(f"QKClip: role= must be 'query' or 'key', got {heads.role!r}")
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
    heads: Any,
    w: Tensor,
    u: Tensor,
    tau: float,
    alpha: float,
    name: str = "",
    layout: Any = None,
) -> Tensor:
    """Return a step after which the weights are (w - u) · factor. If the factor is 1, return u."""
    if not heads:
        return u
    shape = tuple(w.shape if layout is None else layout.shape)
    factor = row_factors(heads, shape, tau, alpha, name)
    factor = (factor if layout is None else layout.part(factor)).to(u.dtype)
    w = w.to(u.dtype)
    return torch.where(factor == 1, u, w - factor * (w - u))
