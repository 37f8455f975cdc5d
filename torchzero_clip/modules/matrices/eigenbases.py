"""Eigenbases: eigenvectors of averages of squares, exact once and then nearer by iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.modules.matrices.batches import matrix_shape
from torchzero_clip.modules.matrices.blocks import block_rows

SIDES = {"left": -2, "right": -1}
"""The sides of a matrix that may have a basis, and the dim that each multiplies."""
TINY = 1e-30  # what the official code adds to the diagonal before the first decomposition


def sides_up_to(rule: Any, rows: int, columns: int) -> dict[str, int]:
    """The sides that have a basis, and how long each is."""
    return {s: n for s, n in zip(SIDES, (rows, columns), strict=True) if n <= rule.max_dim}


def rows_with_bases(rule: Any, name: str, param: Tensor) -> Sequence[int]:
    """The rows of each matrix that a parameter is, where one side is short enough for a basis."""
    if param.dim() < 2 or not param.numel():
        return []
    count, rows, columns = matrix_shape(rule, param, rule.stacks)
    each = block_rows(rule, name, param, rows)
    return [] if min([*each, columns]) > rule.max_dim else each * count


def average(old: Tensor, new: Tensor, rate: Any) -> Tensor:
    """old + (new - old) · rate, in the memory of `new` where the rate is no tensor."""
    if isinstance(rate, Tensor):
        return old + (new - old) * rate
    return new.lerp_(old, 1 - rate)


def eigenvectors(matrix: Tensor) -> Tensor:
    """The eigenvectors, that of the largest eigenvalue first."""
    tiny = TINY * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.eigh(matrix + tiny).eigenvectors.flip(-1)


def eigenvalues(matrix: Tensor, basis: Tensor) -> Tensor:
    """The eigenvalue that each column of a basis has, nearly."""
    return (matrix @ basis).mul_(basis).sum(-2)


def sorted_before(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A power iteration of columns sorted by the eigenvalue that each has nearly, and the order."""
    product = matrix @ basis
    order = (basis * product).sum(-2).argsort(descending=True, stable=True)
    return torch.linalg.qr(ordered(product, order, -1)).Q, order


def sorted_after(matrix: Tensor, basis: Tensor) -> Tensor:
    """A power iteration whose columns are sorted then."""
    new = unsorted(matrix, basis)
    return ordered(new, eigenvalues(matrix, new).argsort(descending=True, stable=True), -1)


def unsorted(matrix: Tensor, basis: Tensor) -> Tensor:
    """A power iteration."""
    return torch.linalg.qr(matrix @ basis).Q


def ordered(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """The rows (-2) or columns (-1) of matrices in an order, each in its own where they are many"""
    if x.dim() == 2:
        return x.index_select(dim, order)
    if len(x) == 1:
        return x.index_select(dim, order[0])
    return x.gather(dim, order.unsqueeze(-3 - dim).expand_as(x))


def into(u: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Qₗᵀ u Qᵣ"""
    u = state["left_basis"].mT @ u if "left_basis" in state else u
    return u @ state["right_basis"] if "right_basis" in state else u


def back(u: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Qₗ u Qᵣᵀ"""
    u = state["left_basis"] @ u if "left_basis" in state else u
    return u @ state["right_basis"].mT if "right_basis" in state else u
