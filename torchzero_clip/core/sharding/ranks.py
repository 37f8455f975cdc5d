"""Ranks: the processes that hold the parts of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torchzero_clip.core.sharding.layout import Layout
from torchzero_clip.core.torch_private import without_modes


def dims_of(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The dims of their mesh that tensors are gathered over, one after another; none where all
    ranks are on it, and are asked at once.
    """
    dims = sorted(frozenset().union(*[layout.split for layout in layouts]))
    return () if len(dims) > 1 and all_coordinates(layouts[0].mesh) else tuple(dims)


def groups_of(mesh: Any, dims: Sequence[int]) -> list[Any]:
    """The process groups along these dims of a mesh, which may be others than before."""
    return [mesh.get_group(d) for d in dims] or [torch.distributed.group.WORLD]


def coordinates_of(mesh: Any, dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The coordinates on the mesh of those whose columns come, in order."""
    return _along(mesh, dims, tuple(mesh.get_coordinate())) if dims else all_coordinates(mesh)


@functools.lru_cache(maxsize=64)
def _along(mesh: Any, dims: tuple[int, ...], here: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
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
    """The coordinate of every process, where all are on the mesh; otherwise none."""
    return _coordinates(mesh) if mesh.size() == torch.distributed.get_world_size() else ()


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    with without_modes():
        found = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in range(mesh.size())]
    return tuple([tuple(coordinate) for coordinate in found])
