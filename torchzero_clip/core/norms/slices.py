"""Statistics of the slices of a tensor along some of its dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.norms.measures import Measure, merge
from torchzero_clip.core.norms.numeric import PIECE, at_least_float32, readable, safe_scale
from torchzero_clip.core.small_tensors import in_stacks
from torchzero_clip.core.tensor_kinds import wide


class SliceRows(NamedTuple):
    """The slices of some tensors.

    Attributes:
        shapes: For each tensor, the shape of a tensor with one number per slice.
        dims: For each tensor, the dims that its slices run along.
        lengths: For each tensor, the number of elements of a slice.
        counts: For each tensor, the number of slices.
        whole: Whether each slice is contiguous in memory and follows the slice before it.
        views: The shape of each tensor, if dims of the tensors are split into several dims.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    whole: bool
    views: tuple[tuple[int, ...], ...] = ()


class OfRows(list[Tensor]):
    """A list of tensors with one number per slice. The tensors are parts of one vector.

    If `fused` is set, slices may be parts of fused parameters. An engine then computes with them as
    with the slices of separate parameters.
    """

    vector: Tensor
    rows: SliceRows
    fused: bool = False


def rows_of(
    views: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int]],
    dims: Sequence[tuple[int, ...]],
    split: bool = False,
) -> SliceRows:
    """Return the slices of tensors along dims.

    Args:
        views: The shapes of the tensors, after some dims are split.
        shapes: The shapes of tensors that have one number per slice.
        dims: For each tensor, the dims that its slices run along.
        split: Whether some dims are split.
    """
    whole = True
    counts = tuple(map(math.prod, shapes))
    sizes = list(map(math.prod, views))
    for view, shape, size in zip(views, shapes, sizes, strict=True):
        cut = [n > 1 for n in shape]  # the dims that lead from slice to slice
        inside = [d for d, n in enumerate(view) if n > 1 and not cut[d]]
        whole = whole and not any(cut[min(inside, default=len(cut)) :]) and size > 0
    lengths = [size // max(n, 1) for size, n in zip(sizes, counts, strict=True)]
    return SliceRows(
        tuple(map(tuple, shapes)),
        tuple(dims),
        tuple(lengths),
        counts,
        whole,
        tuple(map(tuple, views)) if split else (),
    )


def of_rows(vector: Tensor, rows: SliceRows) -> list[Tensor]:
    """Return the elements of a vector as tensors with one number per slice."""
    parts = zip(vector.split(rows.counts), rows.shapes, strict=True)
    views = [part.view(shape) for part, shape in parts]
    if torch.compiler.is_compiling():
        return views
    of_vector = OfRows(views)
    of_vector.vector = vector
    of_vector.rows = rows
    return of_vector


def as_fused(parts: list[Tensor], vector: Tensor, rows: SliceRows) -> OfRows:
    """Return the numbers of slices of fused parameters that are sharded, from this rank's part."""
    fused = OfRows(parts)
    fused.vector = vector
    fused.rows = rows._replace(whole=False)
    fused.fused = True
    return fused


def slice_statistics(x: Tensor, dims: tuple[int, ...], m: Measure) -> Tensor:
    """Return the statistic of each slice along `dims` as a column. Empty slices have zeros."""
    if not dims or x.numel() == 0:
        lengths = [1 if d in dims or not dims else n for d, n in enumerate(x.shape)]
        return torch.zeros(m.rows, math.prod(lengths), dtype=wide(x.device), device=x.device)
    x = x.view(1) if x.dim() == 0 else x
    most = max(PIECE // 2 * len(x) // x.numel(), 1)
    if not readable(x) or most >= len(x):
        return _slice_statistics(x, dims, m)
    blocks = x.split(most)  # so small that the float64 copies stay in the cache
    stats = [_slice_statistics(block, dims, m) for block in blocks]
    if 0 not in dims:
        return torch.cat(stats, dim=1)
    sizes = [math.prod([block.shape[d] for d in dims]) for block in blocks]
    counts = torch.tensor(sizes, dtype=torch.float64, device=x.device)
    return merge(torch.stack(stats, dim=2), counts.expand(stats[0].shape[1], -1), m)


def statistics_of_slices(
    tensors: Sequence[Tensor], dims: Sequence[tuple[int, ...]], m: Measure
) -> list[Tensor]:
    """Return the statistics of the slices of each tensor along its dims."""

    def of_stack(x: Tensor, along: tuple[int, ...]) -> Tensor:
        if not along:
            return x.new_zeros(len(x), m.rows, 1, dtype=wide(x.device))
        stats = slice_statistics(x, _in_stack(along), m)
        return stats.view(m.rows, len(x), -1).transpose(0, 1)

    return in_stacks(tensors, of_stack, lambda t, along: slice_statistics(t, along, m), dims)


def along(grids: Sequence[Tensor], dims: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the norms of grids along some dims, expanded to the elements of the grids."""

    def of_one(grid: Tensor, along: tuple[int, ...]) -> Tensor:
        if not grid.numel():
            return grid.flatten()
        whole = torch.linalg.vector_norm(grid, dim=along, keepdim=True)
        return whole.expand_as(grid).flatten()

    def of_stack(grids: Tensor, along: tuple[int, ...]) -> Tensor:
        return of_one(grids, _in_stack(along)).view(len(grids), -1)

    return in_stacks(grids, of_stack, of_one, dims)


def _in_stack(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims of a tensor as dims of a stack of such tensors."""
    return tuple([d + 1 for d in dims])


def _slice_statistics(x: Tensor, dims: tuple[int, ...], m: Measure) -> Tensor:
    dtype = wide(x.device)
    if m.kind == "power":
        real = x.abs() if x.is_complex() else x
        if m.p > 6 or real.dtype == torch.float64:
            real = real.to(dtype)
            safe = safe_scale(real.abs().amax(dims, keepdim=True))
            norm = torch.linalg.vector_norm(real / safe, m.p, dims, True) * safe
        else:
            norm = torch.linalg.vector_norm(at_least_float32(real), m.p, dims, True, dtype=dtype)
        return norm.view(1, -1)
    if m.kind == "max":
        return x.abs().amax(dims).to(dtype).view(1, -1)
    if m.kind == "count":
        return (x != 0).sum(dims).to(dtype).view(1, -1)
    double = x.to(torch.complex128 if x.is_complex() else dtype)
    if m.kind == "sum":
        return _parts(double.sum(dims))
    safe = safe_scale(double.abs().amax(dims, keepdim=True))
    double = double / safe
    mean = double.mean(dims, keepdim=True)
    m2 = (double - mean).abs().square().sum(dims, keepdim=True)
    return torch.cat([_parts(mean), m2.sqrt().view(1, -1)]) * safe.view(1, -1)


def _parts(x: Tensor) -> Tensor:
    """Return the real and the imaginary parts of numbers, as two rows."""
    flat = x.reshape(-1)
    return torch.stack([flat.real, flat.imag if flat.is_complex() else torch.zeros_like(flat)])
