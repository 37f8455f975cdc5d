"""Statistics of sharded tensors: one collective for all tensors on one mesh.

The statistic of a shard consists of a few numbers. All ranks gather the statistics of all shards at
once and merge them. So every rank has bitwise identical norms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.norms.measures import Measure, merge
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.sharding.layout import Layout
from torchzero_clip.core.sharding.ranks import coordinates_of, dims_of, groups_of
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.torch_private import without_modes

Dims = tuple[int, ...]


class Plan(NamedTuple):
    """How the statistics of the shards on one mesh are merged into statistics of whole units.

    Attributes:
        width: The number of columns that each rank sends.
        columns: For each unit, the indices of its shards' columns among all gathered columns.
        entries: For each unit, the number of elements in each of its shards.
        lengths: The number of units in each tensor.
    """

    width: int
    columns: Tensor
    entries: Tensor
    lengths: tuple[int, ...]


class Gathering(NamedTuple):
    """The tensors on one mesh. One collective gathers the statistics of these tensors.

    Attributes:
        where: The indices of the tensors.
        mesh: The mesh.
        dims: The dims of the mesh to gather over.
        plan: How the gathered statistics are merged.
    """

    where: list[int]
    mesh: Any
    dims: tuple[int, ...]
    plan: Plan

    def merged(self, stats: Tensor, m: Measure) -> Tensor:
        """Return the statistics of whole units from the statistics on this rank."""
        gathered = _gather(stats, groups_of(self.mesh, self.dims), self.plan.width)
        return merge(gathered[:, self.plan.columns], self.plan.entries.to(stats.dtype), m)


def gatherings(
    layouts: Sequence[Layout | None], dims: Sequence[Dims | None], device: torch.device, world: Any
) -> list[Gathering]:
    """Return the gatherings of statistics, one for each mesh with split tensors.

    Args:
        layouts: The layout of each tensor.
        dims: For each tensor, the dims along which its units run. None means that the tensor is one
            unit.
        device: The device of the statistics.
        world: The mode of the statistics if they are fake tensors, or None: see `_plan`.
    """
    meshes = [layout.mesh if layout and layout.split else None for layout in layouts]

    def on_one_mesh(where: list[int]) -> Gathering:
        mesh: Any = meshes[where[0]]
        alike: Any = tuple([layouts[i] for i in where])
        over = dims_of(alike)
        along = tuple([dims[i] for i in where])
        own = tuple(mesh.get_coordinate())
        plan = _plan(alike, along, coordinates_of(mesh, over), own, device, world)
        return Gathering(where, mesh, over, plan)

    return [on_one_mesh(where) for where in batches(meshes) if meshes[where[0]] is not None]


def merge_shards(
    stats: Tensor, lengths: Sequence[int], gatherings: Sequence[Gathering], m: Measure
) -> Tensor:
    """Return the statistics of whole units, with one collective for each mesh.

    Args:
        stats: The statistics on this rank, a column for each unit.
        lengths: The number of columns of each tensor.
        gatherings: How the statistics are gathered.
        m: The measure of the statistics.
    """
    if [len(gathering.where) for gathering in gatherings] == [len(lengths)]:
        return gatherings[0].merged(stats, m)
    columns = list(stats.split(list(lengths), dim=1))
    for gathering in gatherings:
        here = torch.cat([columns[i] for i in gathering.where], dim=1)
        whole = gathering.merged(here, m).split(gathering.plan.lengths, dim=1)
        for i, x in zip(gathering.where, whole, strict=True):
            columns[i] = x
    return torch.cat(columns, dim=1)


def across(
    stats: Tensor, sizes: Tensor, m: Measure, positions: Sequence[int], count: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Return the statistics and sizes of units that have tensors on several ranks of a group.

    Args:
        stats: The statistics on this rank, a column for each unit.
        sizes: The numbers of elements on this rank.
        m: The measure of the statistics.
        positions: The position of each unit among all units of the group.
        count: The number of all units.
        group: The process group.
    """
    here = dict(zip(positions, torch.cat([stats, sizes.unsqueeze(0)]).unbind(1), strict=True))
    zeros = torch.zeros(len(stats) + 1, dtype=stats.dtype, device=stats.device)
    columns = torch.stack([here.get(i, zeros) for i in range(count)], dim=1)
    gathered = gather(columns, group).permute(1, 2, 0)
    units = torch.stack([gathered[:, i] for i in positions], dim=1)
    return merge(units[:-1], units[-1], m), units[-1].sum(dim=1)


def _gather(stats: Tensor, groups: Sequence[Any], width: int) -> Tensor:
    """Return the columns of all ranks next to each other, followed by a column of zeros."""
    rows = len(stats)
    missing = width - stats.shape[1]
    sent = torch.nn.functional.pad(stats, (0, missing)) if missing else stats
    for group in groups:
        sent = gather(sent, group)
    columns = sent.view(-1, rows, width).transpose(0, 1).reshape(rows, -1)
    return torch.cat([columns, columns.new_zeros(rows, 1)], dim=1)


@functools.lru_cache(maxsize=256)
def _plan(
    layouts: tuple[Layout, ...],
    dims: tuple[Dims | None, ...],
    coordinates: tuple[tuple[int, ...], ...],
    own: tuple[int, ...],
    device: torch.device,
    world: Any,
) -> Plan:
    """Return the plan for tensors on one mesh, from the shards of the ranks at these coordinates.

    `own` is the coordinate of this rank. If a tensor has replicas, each rank merges the shards of
    its own replica, so that a guard on some rank sees a NaN in any replica.

    The plan contains no process groups, because an equal mesh may have other groups later. `world`
    is the mode of fake tensors, or None. A plan for fake tensors has tensors of the same mode.
    """
    with without_modes():
        along = [d or range(len(x.shape)) for x, d in zip(layouts, dims, strict=True)]
        shapes = [  # of the grid of units of each tensor
            [1 if d in along_t else n for d, n in enumerate(x.shape)]
            for x, along_t in zip(layouts, along, strict=True)
        ]
        lengths = [math.prod(shape) for shape in shapes]
        numbered = torch.arange(sum(lengths)).split(lengths)
        blocks: list[tuple[Tensor, int, int, int]] = []  # units, sender, its first column, entries
        filled = torch.zeros(sum(lengths), dtype=torch.long)  # known shards of each unit
        width = 0
        for sender, coordinate in enumerate(coordinates):
            column = 0
            for t, layout in enumerate(layouts):
                ends = layout.extents(coordinate)
                here = [slice(None) if d in along[t] else slice(*end) for d, end in enumerate(ends)]
                units = numbered[t].view(shapes[t])[tuple(here)].reshape(-1)
                replicated = set(range(len(coordinate))) - layout.split  # dims of the mesh
                if all([coordinate[d] == own[d] for d in replicated]):
                    entries = math.prod([ends[d][1] - ends[d][0] for d in along[t]])
                    blocks.append((units, sender, column, entries))
                    filled[units] += 1
                column += len(units)
            width = max(width, column)
        index = torch.full((sum(lengths), int(filled.max())), len(coordinates) * width)
        counts = torch.zeros(index.shape, dtype=torch.float64)
        filled.zero_()
        for units, sender, column, entries in blocks:
            start = sender * width + column
            index[units, filled[units]] = torch.arange(start, start + len(units))
            counts[units, filled[units]] = entries
            filled[units] += 1
    return Plan(width, index.to(device), counts.to(device), tuple(lengths))
