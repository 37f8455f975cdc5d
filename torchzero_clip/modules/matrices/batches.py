"""Functions that process many matrices in batches of equal shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, TensorList, TensorwiseTransform, Transform
from torchzero_clip.core.logical_matrices import Grid, NormKind, grid_of, matrices_of
from torchzero_clip.core.matrix_steps import planned_matrices
from torchzero_clip.core.stacks import MOST_ON_CPU, batches, in_order

PRODUCTS = "its matrix products take most of the time, and a replay would not make them faster"
BATCH_ELEMENTS = 2**24  # the largest batch, because a function allocates several times its memory


def apply_to_matrices(rule: TensorwiseTransform, buckets: list[Bucket]) -> list[Bucket]:
    """Run `update` of a rule without state, with the matrices of each parameter in the group."""
    for bucket in buckets:
        bucket.apply(rule, matrices=planned_matrices(bucket))
    return buckets


def changed_matrices(
    rule: TensorwiseTransform,
    u: TensorList,
    group: Group,
    change: Callable[[list[Tensor]], list[Tensor]],
) -> TensorList:
    """Replace all matrices of a list by the results of a function, and return the list.

    Args:
        rule: The rule.
        u: The list.
        group: The group. "matrices" are the matrices of each tensor, if `step` has found them.
        change: A function of stacks of shape (count, rows, columns).
    """
    every = group.get("matrices")
    if every is None:
        every = [rule.matrices_of("", t) for t in u]
    stacks = [matrices.of(t) for matrices, t in zip(every, u, strict=True)]
    changed = iter(change([stack for row in stacks for stack in row]))
    results = []
    for matrices, row in zip(every, stacks, strict=True):
        results.append(matrices.back([next(changed) for _ in row]))
    return u.copy_(TensorList(results))


def grid_for(rule: Transform, kind: NormKind, name: str, param: Tensor) -> Grid:
    """Return the slices of a parameter whose norms a rule about matrices needs."""
    return grid_of(matrices_of(rule, name, param, takes_complex=True), kind, param)


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
