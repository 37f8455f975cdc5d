"""Ranks: the processes that hold the parts of a tensor, and what is gathered from them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.private import without_modes
from torchzero_clip.core.sharding.layout import Layout


def gather(column: Tensor, group: Any) -> Tensor:
    """The tensors of one shape that the ranks of a group hold, stacked."""
    distributed: Any = torch.distributed
    collect = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    out = column.new_empty(distributed.get_world_size(group) * column.numel())
    collect(out, column.reshape(-1), group=group)
    return out.view(-1, *column.shape)


def ranks_of(layouts: Sequence[Layout]) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """The process groups to gather over, one after another, and whose columns come, in order."""
    distributed, mesh = torch.distributed, layouts[0].mesh
    dims = sorted(frozenset().union(*[layout.split for layout in layouts]))
    if len(dims) > 1 and (every := all_coordinates(mesh)):
        return [distributed.group.WORLD], every
    groups = [mesh.get_group(d) for d in dims]
    coordinates = [tuple(mesh.get_coordinate())]
    for d, group in zip(dims, groups, strict=True):
        with without_modes():
            rows = mesh.mesh.movedim(d, 0)
            others = [c for i, c in enumerate(mesh.get_coordinate()) if i != d]
            line = rows[(slice(None), *others)].tolist()
        places = [line.index(rank) for rank in distributed.get_process_group_ranks(group)]
        coordinates = [(*c[:d], place, *c[d + 1 :]) for place in places for c in coordinates]
    return groups, tuple(coordinates)


def all_coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """The coordinate of every process, where all are on the mesh; otherwise none."""
    return _coordinates(mesh) if mesh.size() == torch.distributed.get_world_size() else ()


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    with without_modes():
        found = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in range(mesh.size())]
    return tuple([tuple(coordinate) for coordinate in found])
