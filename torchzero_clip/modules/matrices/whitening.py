"""Functions for the two factors of `Kron`, whose product whitens a matrix.

The factors learn from noise. A factor is a triangular matrix or a diagonal matrix. A diagonal
matrix is stored as the vector of its diagonal. All functions also accept stacks of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.formats.stochastic import halves_, mix_
from torchzero_clip.modules.matrices.eigenbases import gram

DAMPING = torch.finfo(torch.float32).eps ** 0.5  # relative to the mean magnitude of the matrix


def is_diagonal(rule: Any, side: str, n: int, other: int) -> bool:
    """Return whether the factor of a side of length n is diagonal."""
    if rule.diagonal == "all" or n == 1 or n > rule.max_dim:
        return True
    if rule.diagonal == "one" and side == "right" and n == other:
        return True
    return rule.diagonal is not None and n > other


def times(q: Tensor, x: Tensor) -> Tensor:
    """Return Q x."""
    return q @ x if q.dim() == x.dim() else q.unsqueeze(-1) * x


def twice(q: Tensor, x: Tensor) -> Tensor:
    """Return Qᵀ Q x."""
    if q.dim() < x.dim():
        return q.square().unsqueeze(-1) * x
    rows, columns = x.shape[-2:]
    return q.mT @ q @ x if rows < columns else q.mT @ (q @ x)


def solved(q: Tensor, x: Tensor) -> Tensor:
    """Return Q⁻ᵀ x."""
    if q.dim() < x.dim():
        return x / q.unsqueeze(-1)
    return torch.linalg.solve_triangular(q.mT, x, upper=False)


def learned(q: Tensor, a: Tensor, b: Tensor, rate: Tensor | float) -> Tensor:
    """Return Q - rate · triu(a aᵀ - b bᵀ) Q / ‖a aᵀ + b bᵀ‖.

    This change of Q makes a and b more similar.
    """
    if q.dim() < a.dim():
        left = a.square().sum(-1)
        right = b.square().sum(-1)
        return q - (left - right) * q * (rate / at_least_tiny((left + right).amax(-1, True)))
    left = gram(a)
    right = gram(b)
    return q - (left - right).triu() @ q * (rate / at_least_tiny(length(left + right)))


def length(square: Tensor) -> Tensor:
    """Return a lower bound of the largest eigenvalue.

    The function does one power iteration, starting from a column of the matrix.
    """
    largest = at_least_tiny(square.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None])
    x = square / largest
    longest = x.square().sum(-2, keepdim=True).argmax(-1, keepdim=True)
    row = x.take_along_dim(longest, -1).mT @ x
    row = row / row.norm(dim=-1, keepdim=True)
    return (x @ row.mT).norm(dim=-2, keepdim=True) * largest


def at_least_tiny(x: Tensor) -> Tensor:
    """Return max(x, tiny), where tiny is the smallest number that can be a divisor."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def lesson(
    m: Tensor, factors: Mapping[str, Tensor], noise: Tensor, rate: Tensor | float, eps: float
) -> dict[str, Tensor]:
    """Return the factors after one learning step with a matrix and noise."""
    size = m.abs().mean((-2, -1), keepdim=True)
    left = factors["left"]
    a = times(left, m + (DAMPING * size + eps) * noise)
    b = solved(left, noise)
    if "right" not in factors:
        return {"left": learned(left, a, b, rate)}
    right = factors["right"]
    a = times(right, a.mT).mT
    b = solved(right, b.mT).mT
    new_left = learned(left, a, b, rate)
    new_right = learned(right, a.mT, b.mT, rate)
    new_left, new_right = balanced(new_left, new_right, m)
    return {"left": new_left, "right": new_right}


def balanced(left: Tensor, right: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both factors to the same largest element, without changing their product."""
    dims = [(-2, -1) if q.dim() == like.dim() else (-1,) for q in (left, right)]
    a, b = [q.abs().amax(d, True) for q, d in zip((left, right), dims, strict=True)]
    return left * (b.view_as(a) / a).sqrt(), right * (a.view_as(b) / b).sqrt()


def normal(like: Tensor, count: Tensor) -> Tensor:
    """Return normal noise. Each value is a hash of the count and of the position of the element."""
    rows, columns = like.shape[-2:]
    places = torch.arange(rows * columns, dtype=torch.int32, device=like.device)
    key = mix_(count.to(torch.int32))[..., None]
    halves = halves_(places.view(rows, columns) ^ key)
    u, angle = [half.to(like.dtype).add_(0.5).div_(2**16) for half in halves]
    return u.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
