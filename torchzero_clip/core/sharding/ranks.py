"""The ranks that hold the shards of a tensor: their process groups and coordinates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torchzero_clip.core.sharding.layout import Layout
from torchzero_clip.core.torch_private import without_modes


def dims_of(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """Return the dims of the mesh over which tensors are gathered, one after another.

    The result is empty if all ranks are on the mesh and take part in one collective.
    """
    dims = sorted(frozenset().union(*[layout.split for layout in layouts]))
    return () if len(dims) > 1 and all_coordinates(layouts[0].mesh) else tuple(dims)


def groups_of(mesh: Any, dims: Sequence[int]) -> list[Any]:
    """Return the process groups along dims of a mesh. Later calls may return other groups."""
    return [mesh.get_group(d) for d in dims] or [torch.distributed.group.WORLD]


def coordinates_of(mesh: Any, dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the mesh coordinates of the ranks, in the order of gathered tensors."""
    return _along(mesh, dims, tuple(mesh.get_coordinate())) if dims else all_coordinates(mesh)


@functools.lru_cache(maxsize=64)
def _along(mesh: Any, dims: tuple[int, ...], here: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates of the ranks that differ from `here` at most in these dims."""
    coordinates = [here]
    for d, group in zip(dims, groups_of(mesh, dims), strict=True):
        with without_modes():
            rows = mesh.mesh.movedim(d, 0)
            others = [c for i, c in enumerate(here) if i != d]
            line = rows[(slice(None), *others)].tolist()
        places = [line.index(rank) for rank in torch.distributed.get_process_group_ranks(group)]
        coordinates = [(*c[:d], place, *c[d + 1 :]) for place in places for c in coordinates]
    return tuple(coordinates)


def all_coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """Return the coordinate of every rank, or an empty tuple if a rank is not on the mesh."""
    return _coordinates(mesh) if mesh.size() == torch.distributed.get_world_size() else ()


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    with without_modes():
        rows = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in range(mesh.size())]
    return tuple(map(tuple, rows))


def rank_and_world() -> tuple[int, int]:
    """Return the index of this rank, and the number of ranks: 0 and 1 for a single process."""
    ranks = torch.distributed
    if not (ranks.is_available() and ranks.is_initialized()):
        return 0, 1
    return ranks.get_rank(), ranks.get_world_size()
