"""Shards: the statistics of all parts of a tensor, by one collective.

What links measure of the part here is a few numbers a tensor; those of all ranks are gathered at
once and merged, so that every rank knows the same norms to the last bit.
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
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.torch_private import without_modes

Dims = tuple[int, ...]


class Plan(NamedTuple):
    """A plan of how the statistics of the shards on one mesh become those of whole tensors."""

    width: int  # columns that each rank sends
    columns: Tensor  # (units, shards of a unit): the column among all that were gathered
    entries: Tensor  # (units, shards of a unit): the entries that each stands for
    lengths: tuple[int, ...]  # units of each tensor


class Gathering(NamedTuple):
    """What is gathered at once: the tensors on one mesh; those on none, which are whole here, have
    no plan.
    """

    where: list[int]  # the places of the tensors
    mesh: Any
    dims: tuple[int, ...]  # of the mesh
    plan: Plan | None

    def merged(self, mine: Tensor, m: Measure) -> Tensor:
        """Statistics of whole units from those of the parts here."""
        if self.plan is None:
            return mine
        every = _gather(mine, groups_of(self.mesh, self.dims), self.plan.width)
        return merge(every[:, self.plan.columns], self.plan.entries.to(mine.dtype), m)


def gatherings(
    layouts: Sequence[Layout | None], dims: Sequence[Dims | None], device: torch.device, world: Any
) -> list[Gathering]:
    """How statistics are gathered, for each mesh.

    Args:
        layouts: Of each tensor.
        dims: What a unit is of each tensor: its slices along these dims, or (None) all of it.
        device, world: Where the statistics are: see `_plan`.
    """
    meshes = [layout.mesh if layout and layout.split else None for layout in layouts]

    def on(some: list[int]) -> Gathering:
        if meshes[some[0]] is None:
            return Gathering(some, None, (), None)
        alike: Any = tuple([layouts[i] for i in some])
        mesh, over, along = meshes[some[0]], dims_of(alike), tuple([dims[i] for i in some])
        plan = _plan(alike, along, coordinates_of(mesh, over), device, world)
        return Gathering(some, mesh, over, plan)

    return list(map(on, batches(meshes)))


def merge_shards(
    stats: Tensor, lengths: Sequence[int], every: Sequence[Gathering], m: Measure
) -> Tensor:
    """Statistics of whole units from those of the parts here: one collective for each mesh.

    Args:
        stats: A column for each unit here.
        lengths: How many columns each tensor has.
        every: How they are gathered.
        m: What was measured.
    """
    if len(every) == 1:
        return every[0].merged(stats, m)
    pieces, of = stats.split(list(lengths), dim=1), {x.where[0]: x for x in every}

    def merged(some: list[int]) -> Sequence[Tensor]:
        here, gathering = [pieces[i] for i in some], of[some[0]]
        if gathering.plan is None:
            return here
        whole = gathering.merged(torch.cat(here, dim=1), m)
        return whole.split(gathering.plan.lengths, dim=1)

    return torch.cat(in_order([x.where for x in every], merged), dim=1)


def across(
    stats: Tensor, sizes: Tensor, m: Measure, positions: Sequence[int], count: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Statistics and sizes of units that go on in the other processes of a group.

    `positions` are those of the units here among the `count` that there may be in all.
    """
    mine = dict(zip(positions, torch.cat([stats, sizes.unsqueeze(0)]).unbind(1), strict=True))
    none = torch.zeros(len(stats) + 1, dtype=stats.dtype, device=stats.device)
    columns = [mine.get(i, none) for i in range(count)]
    every = gather(torch.stack(columns, dim=1), group).permute(1, 2, 0)
    here = torch.stack([every[:, i] for i in positions], dim=1)
    return merge(here[:-1], here[-1], m), here[-1].sum(dim=1)


def _gather(mine: Tensor, groups: Sequence[Any], width: int) -> Tensor:
    """The columns of all ranks side by side, and a last one of zeros."""
    rows, missing = len(mine), width - mine.shape[1]
    sent = torch.nn.functional.pad(mine, (0, missing)) if missing else mine
    for group in groups:
        sent = gather(sent, group)
    every = sent.view(-1, rows, width).transpose(0, 1).reshape(rows, -1)
    return torch.cat([every, every.new_zeros(rows, 1)], dim=1)


@functools.lru_cache(maxsize=256)
def _plan(
    layouts: tuple[Layout, ...],
    dims: tuple[Dims | None, ...],
    coordinates: tuple[tuple[int, ...], ...],
    device: torch.device,
    world: Any,
) -> Plan:
    """The plan of shapes and placements alone, on a device: process groups may be made anew for
    equal meshes. Fake tensors have a `world` of their own, and none of its tensors.
    """
    with without_modes():
        along = [d or range(len(x.shape)) for x, d in zip(layouts, dims, strict=True)]
        shapes = [
            [1 if d in along_t else n for d, n in enumerate(x.shape)]
            for x, along_t in zip(layouts, along, strict=True)
        ]
        lengths = [math.prod(shape) for shape in shapes]
        numbered = torch.arange(sum(lengths)).split(lengths)
        blocks: list[tuple[Tensor, int, int, int]] = []  # units, sender, its first column, entries
        filled = torch.zeros(sum(lengths), dtype=torch.long)  # how many shards of a unit are known
        width = 0
        for sender, coordinate in enumerate(coordinates):
            column = 0
            for t, layout in enumerate(layouts):
                ends = layout.extents(coordinate)
                here = [slice(None) if d in along[t] else slice(*end) for d, end in enumerate(ends)]
                units = numbered[t].view(shapes[t])[tuple(here)].reshape(-1)
                # along the others, all have equal copies
                idle = set(range(len(coordinate))) - layout.split
                if all([coordinate[d] == coordinates[0][d] for d in idle]):
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
