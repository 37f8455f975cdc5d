"""Functions that process many matrices in batches of equal shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchzero_clip.core import Transform, Units
from torchzero_clip.core.stacks import MOST_ON_CPU, batches, in_order

PRODUCTS = "its matrix products take most of the time, and a replay would not make them faster"
BATCH_ELEMENTS = 2**24  # the largest batch, because a function allocates several times its memory


def matrix_shape(rule: Transform, t: Tensor, stacks: bool | None) -> tuple[int, int, int]:
    """Return the number of matrices in a tensor, and the rows and columns of a matrix."""
    if t.is_complex():
        _refuse(rule, t)
    check_shape(rule, t, stacks)
    if t.dim() == 3 and stacks:
        return t.shape[0], t.shape[1], t.shape[2]
    return 1, t.shape[0], math.prod(t.shape[1:])


def check_shape(rule: Transform, t: Tensor, stacks: bool | None) -> None:
    """Raise ValueError if a tensor is not a matrix, or if `stacks` must decide what it is."""
    name = type(rule).__name__
    if t.dim() < 2:
        _refuse(rule, t)
    if t.dim() == 3 and stacks is None:
        raise ValueError(
            f"{name}: a tensor of shape {tuple(t.shape)} may be a stack of matrices or one "
            f"matrix. Write {name}(stacks=True) for {t.shape[0]} matrices of {t.shape[1]} x "
            f"{t.shape[2]}, or {name}(stacks=False) for one matrix of {t.shape[0]} x "
            f"{t.shape[1] * t.shape[2]}"
        )
    if t.dim() > 3 and stacks:
        *outer, rows, columns = t.shape
        stack = (math.prod(outer), rows, columns)
        raise ValueError(
            f"{name}: with stacks=True a tensor must have at most 3 dims, got shape "
            f"{tuple(t.shape)}. For {stack[0]} matrices of {rows} x {columns}, use a "
            f"parameter of shape {stack}. For one matrix of {t.shape[0]} x "
            f"{math.prod(t.shape[1:])}, use {name}(stacks=False), for example in a Partition"
        )


def _refuse(rule: Transform, t: Tensor) -> NoReturn:
    """Raise ValueError because a tensor is not a matrix of real numbers."""
    raise ValueError(
        f"{type(rule).__name__} needs real matrices, got shape {tuple(t.shape)} and "
        f"{t.dtype}: use Partition or a second optimizer to give this parameter a transform "
        "that is not for matrices"
    )


def row_dims(t: Tensor, stacks: bool | None) -> tuple[int, ...]:
    """Return the dims of a tensor that a row of a matrix covers."""
    return tuple(range(2 if stacks and t.dim() == 3 else 1, t.dim()))


def over_matrices(units: Units, rows: Tensor, stacks: bool | None) -> Tensor:
    """Return a vector with one element per row: the norm of the matrix that contains the row."""
    return units.over(rows, lambda t: tuple(range(1 if stacks and t.dim() == 3 else 0, t.dim())))


def in_batches(pieces: Sequence[Tensor], function: Callable[[Tensor], Any]) -> list[Tensor]:
    """Apply a function to every piece, of shape (count, rows, columns), in batches of equal shape.

    Matrices with more rows than columns are transposed before the call.
    """
    on_cpu = bool(pieces) and pieces[0].device.type == "cpu"
    limit = MOST_ON_CPU if on_cpu else BATCH_ELEMENTS
    is_tall = [x.shape[1] > x.shape[2] for x in pieces]
    wide = [x.mT if tall else x for x, tall in zip(pieces, is_tall, strict=True)]

    def batch_results(members: list[int]) -> list[Tensor]:
        batch = function(torch.cat([wide[i] for i in members]))
        sizes = [len(wide[i]) for i in members]
        if all([is_tall[i] for i in members]) and not batch.is_cpu:
            # one copy of the batch, because later kernels need contiguous tensors
            return list(batch.mT.contiguous().split(sizes))
        parts = zip(batch.split(sizes), members, strict=True)
        return [part.mT if is_tall[i] else part for part, i in parts]

    shapes = [tuple(x.shape[1:]) for x in wide]
    return in_order(batches(shapes, [x.numel() for x in wide], limit), batch_results)
