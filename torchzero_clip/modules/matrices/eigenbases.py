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
MIRRORED_FROM = 256  # rows, from which half of the products cost more than a copy of them
STRIPES = 4  # which do 10 of 16 products
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
    """old + (new - old) · rate, in the memory of `new`, rounded alike for a number or a tensor."""
    if not new.is_cpu:  # where a tensor of the host may be a factor, and is not sent
        return new.sub_(old).mul_(rate).add_(old)
    stays = 1 - rate
    return new.lerp_(old, stays.to(new.dtype) if isinstance(stays, Tensor) else stays)


def gram(x: Tensor) -> Tensor:
    """x xᵀ, of large matrices on CPU only what lies left of the diagonal, which is mirrored."""
    rows = x.shape[-2]
    if not x.is_cpu or rows < MIRRORED_FROM or (x.dim() > 2 and len(x) > 1):
        return x @ x.mT
    if x.dim() > 2:
        return gram(x[0]).unsqueeze(0)
    out, most = x.new_empty(rows, rows), -(-rows // STRIPES)
    for begin in range(0, rows, most):
        end = min(begin + most, rows)
        torch.mm(x[begin:end], x[:end].mT, out=out[begin:end, :end])
        out[:begin, begin:end].copy_(out[begin:end, :begin].mT)
    return out


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
    return orthonormal(ordered(product, order, -1)), order


def sorted_after(matrix: Tensor, basis: Tensor) -> Tensor:
    """A power iteration whose columns are sorted then."""
    new = unsorted(matrix, basis)
    return ordered(new, eigenvalues(matrix, new).argsort(descending=True, stable=True), -1)


def unsorted(matrix: Tensor, basis: Tensor) -> Tensor:
    """A power iteration."""
    return orthonormal(matrix @ basis)


def orthonormal(x: Tensor) -> Tensor:
    """Q of x = Q R."""
    if not x.is_cpu:
        return torch.linalg.qr(x).Q
    if x.dim() > 2 and len(x) == 1:  # torch transposes one matrix ten times as fast as a stack
        return orthonormal(x[0]).unsqueeze(0)
    return torch.linalg.qr(x).Q.contiguous()


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
