"""Batches: the matrices of a list, those of one shape as one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchzero_clip.core import Transform, Units
from torchzero_clip.core.stacks import MOST_ON_CPU, batches, in_order

PRODUCTS = "its products of matrices take the step's time, replayed or not: there is nothing to do"
MOST = 2**24  # entries of a batch, for which memory is taken several times


def matrix_shape(rule: Transform, t: Tensor, stacks: bool | None) -> tuple[int, int, int]:
    """How many matrices a tensor is, and their rows and columns."""
    if t.is_complex():
        _refuse(rule, t)
    check_shape(rule, t, stacks)
    if t.dim() == 3 and stacks:
        return t.shape[0], t.shape[1], t.shape[2]
    return 1, t.shape[0], math.prod(t.shape[1:])


def check_shape(rule: Transform, t: Tensor, stacks: bool | None) -> None:
    """Raise ValueError for a tensor that is not a matrix, or that can be read in two ways."""
    name = type(rule).__name__
    if t.dim() < 2:
        _refuse(rule, t)
    if t.dim() == 3 and stacks is None:
        raise ValueError(
            f"{name}: a tensor of shape {tuple(t.shape)} may be a stack of matrices or one matrix: "
            f"say {name}(stacks=True) for {t.shape[0]} matrices of {t.shape[1]} x {t.shape[2]}, or "
            f"stacks=False for one of {t.shape[0]} x {t.shape[1] * t.shape[2]}"
        )
    if t.dim() > 3 and stacks:
        *outer, rows, columns = t.shape
        stack = (math.prod(outer), rows, columns)
        raise ValueError(
            f"{name}: with stacks=True a tensor must have at most 3 dims, got shape "
            f"{tuple(t.shape)}. Make a parameter of shape {stack} for {stack[0]} matrices of "
            f"{rows} x {columns}, or give it to {name}(stacks=False) for one matrix of "
            f"{t.shape[0]} x {math.prod(t.shape[1:])}, for example in a Partition."
        )


def _refuse(rule: Transform, t: Tensor) -> NoReturn:
    raise ValueError(
        f"{type(rule).__name__} takes real matrices, got shape {tuple(t.shape)} and {t.dtype}: "
        "give other parameters to another rule, as in Partition or a second optimizer"
    )


def row_dims(t: Tensor, stacks: bool | None) -> tuple[int, ...]:
    """The dims that a row of the matrices of a tensor runs along."""
    return tuple(range(2 if stacks and t.dim() == 3 else 1, t.dim()))


def over_matrices(units: Units, rows: Tensor, stacks: bool | None) -> Tensor:
    """The norm of the matrix that each row is of, from those of all rows."""
    return units.over(rows, lambda t: tuple(range(1 if stacks and t.dim() == 3 else 0, t.dim())))


def in_batches(pieces: Sequence[Tensor], function: Callable[[Tensor], Any]) -> list[Tensor]:
    """The function of every piece, (count, rows, columns), those of one shape in one call.

    Matrices with more rows than columns come as their transposes.
    """
    most = MOST_ON_CPU if pieces and pieces[0].device.type == "cpu" else MOST
    lying = [x.mT if x.shape[1] > x.shape[2] else x for x in pieces]

    def made(some: list[int]) -> list[Tensor]:
        whole = function(torch.cat([lying[i] for i in some]))
        turned = [lying[i] is not pieces[i] for i in some]
        if all(turned) and not whole.is_cpu:  # once, for what takes many tensors as they lie
            whole, turned = whole.mT.contiguous(), [False] * len(some)
        parts = whole.split([len(lying[i]) for i in some])
        return [x.mT if is_turned else x for x, is_turned in zip(parts, turned, strict=True)]

    kinds = [tuple(x.shape[1:]) for x in lying]
    return in_order(batches(kinds, list(map(Tensor.numel, lying)), most), made)
