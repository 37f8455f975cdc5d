"""Functions for eigenvectors of averages: exact ones first, then refined by power iterations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import TensorwiseTransform
from torchzero_clip.core.logical_matrices import LogicalMatrices

SIDES = {"left": -2, "right": -1}
"""The sides of a matrix that may have a basis. The value is the dim that the basis multiplies."""
ROWS_TO_MIRROR = 256  # from this size on, half of the products cost more time than a copy
STRIPES = 4  # the products of a lower half in 4 stripes are 10 of 16 blocks
TINY = 1e-30  # the official code adds it to the diagonal before the first decomposition


def sides_up_to(rule: Any, rows: int, columns: int) -> dict[str, int]:
    """Return a dict of the sides that have a basis. The values are the lengths of the sides."""
    return {s: n for s, n in zip(SIDES, (rows, columns), strict=True) if n <= rule.max_dim}


def matrices_with_bases(rule: Any, name: str, param: Tensor) -> LogicalMatrices | None:
    """Return the matrices of a parameter, or None if all sides of all matrices are too long."""
    matrices = TensorwiseTransform.matrices_of(rule, name, param)
    if matrices is None or min([min(size) for size in matrices.sizes]) > rule.max_dim:
        return None
    return matrices


def average(old: Tensor, new: Tensor, rate: Any) -> Tensor:
    """Return old + (new - old) · rate, computed in the memory of `new`.

    A number and a tensor with the same `rate` give identical results.
    """
    if not new.is_cpu:  # lerp_ would need a copy of the rate on the device, mul_ does not
        return new.sub_(old).mul_(rate).add_(old)
    weight_of_old = 1 - rate
    if isinstance(weight_of_old, Tensor):
        weight_of_old = weight_of_old.to(new.dtype)
    return new.lerp_(old, weight_of_old)


def gram(x: Tensor) -> Tensor:
    """Return x xᵀ. For a large matrix on CPU, compute its lower half and mirror it."""
    rows = x.shape[-2]
    if not x.is_cpu or rows < ROWS_TO_MIRROR or (x.dim() > 2 and len(x) > 1):
        return x @ x.mT
    if x.dim() > 2:
        return gram(x[0]).unsqueeze(0)
    product = x.new_empty(rows, rows)
    stripe = -(-rows // STRIPES)
    for begin in range(0, rows, stripe):
        end = min(begin + stripe, rows)
        torch.mm(x[begin:end], x[:end].mT, out=product[begin:end, :end])
        product[:begin, begin:end].copy_(product[begin:end, :begin].mT)
    return product


def eigenvectors(matrix: Tensor) -> Tensor:
    """Return the eigenvectors of a matrix, sorted from the largest eigenvalue to the smallest."""
    tiny = TINY * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.eigh(matrix + tiny).eigenvectors.flip(-1)


def eigenvalues(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return the approximate eigenvalue of each column of a basis."""
    return (matrix @ basis).mul_(basis).sum(-2)


def sorted_before(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the columns, do a power iteration, and return the new columns and their old positions.

    The function sorts the columns by their approximate eigenvalues, before the power iteration.
    """
    product = matrix @ basis
    order = (basis * product).sum(-2).argsort(descending=True, stable=True)
    return orthonormal(ordered(product, order, -1)), order


def sorted_after(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return the result of a power iteration, with the columns sorted by their new eigenvalues."""
    new = unsorted(matrix, basis)
    return ordered(new, eigenvalues(matrix, new).argsort(descending=True, stable=True), -1)


def unsorted(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return the result of a power iteration, without sorting the columns."""
    return orthonormal(matrix @ basis)


def orthonormal(x: Tensor) -> Tensor:
    """Return Q of the decomposition x = Q R."""
    if not x.is_cpu:
        return torch.linalg.qr(x).Q
    if x.dim() > 2 and len(x) == 1:  # torch copies one matrix ten times as fast as a stack of one
        return orthonormal(x[0]).unsqueeze(0)
    return torch.linalg.qr(x).Q.contiguous()


def ordered(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """Return matrices with the rows (dim -2) or columns (dim -1) in the given order."""
    if x.dim() == 2:
        return x.index_select(dim, order)
    if len(x) == 1:
        return x.index_select(dim, order[0])
    return x.gather(dim, order.unsqueeze(-3 - dim).expand_as(x))


def into(u: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return Qₗᵀ u Qᵣ, which is u in the coordinates of the bases."""
    u = state["left_basis"].mT @ u if "left_basis" in state else u
    return u @ state["right_basis"] if "right_basis" in state else u


def back(u: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return Qₗ u Qᵣᵀ, which is u in the original coordinates."""
    u = state["left_basis"] @ u if "left_basis" in state else u
    return u @ state["right_basis"].mT if "right_basis" in state else u
