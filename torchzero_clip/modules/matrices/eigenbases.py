"""Eigenbases: eigenvectors of averages of squares, exact once and then nearer by iterations."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-30  # what the official code adds to the diagonal before the first decomposition


def eigenvectors(matrix: Tensor) -> Tensor:
    """The eigenvectors, that of the largest eigenvalue first."""
    tiny = TINY * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.eigh(matrix + tiny).eigenvectors.flip(1)


def sorted_before(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """A power iteration of columns sorted by the eigenvalue that each has nearly, and the order."""
    product = matrix @ basis
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    return torch.linalg.qr(product[:, order]).Q, order


def sorted_after(matrix: Tensor, basis: Tensor) -> Tensor:
    """A power iteration whose columns are sorted then."""
    new = torch.linalg.qr(matrix @ basis).Q
    values = (new * (matrix @ new)).sum(0)
    return new[:, values.argsort(descending=True, stable=True)]
