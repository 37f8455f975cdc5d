"""Whitening: two factors whose product makes a matrix white, and how they learn from noise.

A factor is a triangular matrix, or its diagonal alone, with one dim less than the matrix. All of it
takes stacks of matrices too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.formats.stochastic import halves_, mix_
from torchzero_clip.modules.matrices.eigenbases import gram

DAMPING = torch.finfo(torch.float32).eps ** 0.5  # of the mean size of what is learned from


def is_diagonal(rule: Any, side: str, n: int, other: int) -> bool:
    """Whether a side of n, beside another, has the diagonal of a factor alone."""
    if rule.diagonal == "all" or n == 1 or n > rule.max_dim:
        return True
    of_equals = rule.diagonal == "one" and side == "right" and n == other
    return of_equals or (rule.diagonal is not None and n > other)


def times(q: Tensor, x: Tensor) -> Tensor:
    """Q x"""
    return q @ x if q.dim() == x.dim() else q.unsqueeze(-1) * x


def twice(q: Tensor, x: Tensor) -> Tensor:
    """Qᵀ Q x"""
    if q.dim() < x.dim():
        return q.square().unsqueeze(-1) * x
    rows, columns = x.shape[-2:]
    return q.mT @ q @ x if rows < columns else q.mT @ (q @ x)


def solved(q: Tensor, x: Tensor) -> Tensor:
    """Q⁻ᵀ x"""
    if q.dim() < x.dim():
        return x / q.unsqueeze(-1)
    return torch.linalg.solve_triangular(q.mT, x, upper=False)


def learned(q: Tensor, a: Tensor, b: Tensor, rate: Tensor | float) -> Tensor:
    """Q - rate · triu(a aᵀ - b bᵀ) Q / ‖a aᵀ + b bᵀ‖, after which a and b are more alike."""
    if q.dim() < a.dim():
        left, right = a.square().sum(-1), b.square().sum(-1)
        return q - (left - right) * q * (rate / at_least_tiny((left + right).amax(-1, True)))
    left, right = gram(a), gram(b)
    return q - (left - right).triu() @ q * (rate / at_least_tiny(length(left + right)))


def length(square: Tensor) -> Tensor:
    """A lower bound of the largest eigenvalue: what one power iteration makes of a column."""
    most = at_least_tiny(square.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None])
    x = square / most
    longest = x.square().sum(-2, keepdim=True).argmax(-1, keepdim=True)
    row = x.take_along_dim(longest, -1).mT @ x
    row = row / row.norm(dim=-1, keepdim=True)
    return (x @ row.mT).norm(dim=-2, keepdim=True) * most


def at_least_tiny(x: Tensor) -> Tensor:
    """What may be divided by."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def lesson(
    m: Tensor, factors: Mapping[str, Tensor], noise: Tensor, rate: Tensor | float, eps: float
) -> dict[str, Tensor]:
    """The factors after they have seen a matrix beside noise."""
    size = m.abs().mean((-2, -1), keepdim=True)
    left, right = factors["left"], factors.get("right")
    a, b = times(left, m + (DAMPING * size + eps) * noise), solved(left, noise)
    if right is None:
        return {"left": learned(left, a, b, rate)}
    a, b = times(right, a.mT).mT, solved(right, b.mT).mT
    new = learned(left, a, b, rate), learned(right, a.mT, b.mT, rate)
    return dict(zip(("left", "right"), balanced(*new, m), strict=True))


def balanced(left: Tensor, right: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a matrix with one largest entry, whose product is as it was."""
    dims = [(-2, -1) if q.dim() == like.dim() else (-1,) for q in (left, right)]
    a, b = [q.abs().amax(d, True) for q, d in zip((left, right), dims, strict=True)]
    return left * (b.view_as(a) / a).sqrt(), right * (a.view_as(b) / b).sqrt()


def normal(like: Tensor, count: Tensor) -> Tensor:
    """Normal numbers that are a hash of a count and of the place of each entry in its matrix."""
    rows, columns = like.shape[-2:]
    places = torch.arange(rows * columns, dtype=torch.int32, device=like.device)
    key = mix_(count.to(torch.int32))[..., None]
    halves = halves_(places.view(rows, columns) ^ key)
    u, angle = [half.to(like.dtype).add_(0.5).div_(2**16) for half in halves]
    return u.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
