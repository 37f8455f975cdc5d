"""Shards: the part of a DTensor on this rank, and one collective for the statistics of all parts.

Links see plain tensors: of a sharded parameter the part that is here. What they measure of it is a
few numbers a tensor; those of all ranks are gathered at once and merged, so that every rank knows
the same norms to the last bit.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms.measures import Measure, merge
from torchzero_clip.core.private import is_flat
from torchzero_clip.core.tensors import all_plain, is_sharded

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How the parts of one tensor lie on a mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def split(self) -> frozenset[int]:
        """The dims of the mesh that the tensor is split over."""
        return frozenset([i for i, p in enumerate(self.placements) if _is_split(p)])

    def extents(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """For each dim of the tensor, from where to where the part at a coordinate goes.

        Tensor parallelism splits before FSDP does, though its mesh dim comes after: torch marks
        FSDP's placement with a `split_factor` then.
        """
        out = [(0, n) for n in self.shape]
        strided = [i for i in self.split if hasattr(self.placements[i], "split_factor")]
        for i in sorted(self.split - set(strided)) + sorted(strided, reverse=True):
            dim = self.placements[i].dim
            start, stop = out[dim]
            size = -(-(stop - start) // self.mesh.size(i))
            first = min(start + size * coordinate[i], stop)
            out[dim] = (first, min(first + size, stop))
        return out

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that is whole, or of one that is 1 long in some dims."""
        ends = enumerate(self.extents(self.mesh.get_coordinate()))
        here = [slice(*end) if whole.shape[d] == self.shape[d] else slice(None) for d, end in ends]
        return whole[tuple(here)]

    def wrap(self, part: Tensor) -> Tensor:
        """The DTensor of which this is the part here."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        out: Tensor = DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=stride,
        )
        return out

    def whole(self, part: Tensor) -> Tensor:
        """The tensor of which this is the part here: a collective, and memory for all of it."""
        out = part.new_zeros(self.shape)
        self.part(out).copy_(part)
        for d in sorted(self.split):
            torch.distributed.all_reduce(out, group=self.mesh.get_group(d))
        return out


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a DTensor; None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    return Layout(sharded.device_mesh, tuple(sharded.placements), tuple(sharded.shape))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is here, in its own memory; a plain tensor is all here."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "trigger_wait") else part


def whole_of(part: Tensor, layout: Layout | None) -> Tensor:
    """The tensor of which this is the part here; one without a layout is all here."""
    return part if layout is None else layout.whole(part)


def part_of(whole: Tensor, layout: Layout | None) -> Tensor:
    """The part here of a whole tensor."""
    return whole if layout is None else layout.part(whole)


def full(tensor: Tensor) -> Tensor:
    """A DTensor gathered from all ranks."""
    return whole_of(local(tensor), layout_of(tensor))


def aligned_grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of parameters, sharded as these are.

    Tensor parallelism may leave a gradient partly summed.
    """
    if not all_plain(params):
        for p in params:
            grad: Any = p.grad
            if grad is not None and is_sharded(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return [p.grad for p in params]


def refuse_flat(params: Sequence[Tensor]) -> None:
    """Raise a sentence for the flat shards of FSDP1, of which no norm is right."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    if any([is_flat(param) for param in params]):
        raise TypeError(
            "FullyShardedDataParallel keeps parameters as flat pieces, whose norms are not those "
            "of the parameters: wrap the model with torch.distributed.fsdp.fully_shard instead"
        )


# ---------------------------------------------------------------------- statistics of all shards


@dataclass(frozen=True)
class Plan:
    """A plan of how the statistics of the shards on one mesh become those of whole tensors."""

    width: int  # columns that each rank sends
    index: Tensor  # (units, shards of a unit): the column among all that were gathered
    counts: Tensor  # (units, shards of a unit): the entries that each stands for
    lengths: tuple[int, ...]  # units of each tensor


def merge_shards(
    stats: Tensor,
    lengths: Sequence[int],
    layouts: Sequence[Layout | None],
    dims: Sequence[Dims | None],
    m: Measure,
) -> Tensor:
    """Statistics of whole units from those of the parts here: one collective for each mesh.

    Args:
        stats: A column for each unit here.
        lengths: How many columns each tensor has.
        layouts: Of each tensor.
        dims: What a unit is of each tensor: its slices along these dims, or (None) all of it.
        m: What was measured.
    """
    meshes: dict[Any, list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout is not None and layout.split:
            meshes.setdefault(layout.mesh, []).append(i)
    if not meshes:
        return stats
    pieces = list(stats.split(list(lengths), dim=1))
    for members in meshes.values():
        some = tuple([layout for i in members if (layout := layouts[i]) is not None])
        groups, coordinates = ranks_of(some)
        plan = _plan(some, tuple([dims[i] for i in members]), coordinates, stats.device)
        mine = torch.cat([pieces[i] for i in members], dim=1)
        every = _gather(mine, groups, plan.width)
        whole = merge(every[:, plan.index], plan.counts.to(stats.dtype), m)
        for i, piece in zip(members, whole.split(plan.lengths, dim=1), strict=True):
            pieces[i] = piece
    return torch.cat(pieces, dim=1)


def gather(column: Tensor, group: Any) -> Tensor:
    """The tensors of one shape that the ranks of a group hold, stacked."""
    distributed: Any = torch.distributed
    collect = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    out = column.new_empty(distributed.get_world_size(group) * column.numel())
    collect(out, column.reshape(-1), group=group)
    return out.view(-1, *column.shape)


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
    rows = len(mine)
    sent = torch.nn.functional.pad(mine, (0, width - mine.shape[1]))
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
) -> Plan:
    """The plan of shapes and placements alone: process groups may be made anew for equal meshes."""
    along = [d or range(len(x.shape)) for x, d in zip(layouts, dims, strict=True)]
    shapes = [
        [1 if d in along_t else n for d, n in enumerate(x.shape)]
        for x, along_t in zip(layouts, along, strict=True)
    ]
    lengths = [math.prod(shape) for shape in shapes]
    numbered = torch.arange(sum(lengths)).split(lengths)
    blocks: list[tuple[Tensor, int, int, int]] = []  # units, sender, its first column, entries
    width = 0
    for sender, coordinate in enumerate(coordinates):
        column = 0
        for t, layout in enumerate(layouts):
            ends = layout.extents(coordinate)
            here = [slice(None) if d in along[t] else slice(*end) for d, end in enumerate(ends)]
            units = numbered[t].view(shapes[t])[tuple(here)].reshape(-1)
            idle = set(range(len(coordinate))) - layout.split  # along these, all have equal copies
            if all([coordinate[d] == coordinates[0][d] for d in idle]):
                entries = math.prod([ends[d][1] - ends[d][0] for d in along[t]])
                blocks.append((units, sender, column, entries))
            column += len(units)
        width = max(width, column)
    filled = torch.zeros(sum(lengths), dtype=torch.long)  # how many shards of a unit are known
    for units, *_ in blocks:
        filled[units] += 1
    index = torch.full((sum(lengths), int(filled.max())), len(coordinates) * width)
    counts = torch.zeros(index.shape, dtype=torch.float64)
    filled.zero_()
    for units, sender, column, entries in blocks:
        start = sender * width + column
        index[units, filled[units]] = torch.arange(start, start + len(units))
        counts[units, filled[units]] = entries
        filled[units] += 1
    return Plan(width, index.to(device), counts.to(device), tuple(lengths))


def ranks_of(layouts: Sequence[Layout]) -> tuple[list[Any], tuple[tuple[int, ...], ...]]:
    """The process groups to gather over, one after another, and whose columns come, in order."""
    distributed, mesh = torch.distributed, layouts[0].mesh
    dims = sorted(frozenset().union(*[layout.split for layout in layouts]))
    if len(dims) > 1 and (every := all_coordinates(mesh)):
        return [distributed.group.WORLD], every
    groups = [mesh.get_group(d) for d in dims]
    coordinates = [tuple(mesh.get_coordinate())]
    for d, group in zip(dims, groups, strict=True):
        line = mesh.mesh.movedim(d, 0)[(slice(None), *_without(mesh.get_coordinate(), d))].tolist()
        places = [line.index(rank) for rank in distributed.get_process_group_ranks(group)]
        coordinates = [(*c[:d], place, *c[d + 1 :]) for place in places for c in coordinates]
    return groups, tuple(coordinates)


def all_coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    """The coordinate of every process, where all are on the mesh; otherwise none."""
    world = torch.distributed.get_world_size()
    return _coordinates(mesh) if mesh.size() == world else ()


@functools.lru_cache(maxsize=64)
def _coordinates(mesh: Any) -> tuple[tuple[int, ...], ...]:
    found = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in range(mesh.size())]
    return tuple([tuple(coordinate) for coordinate in found])


def _without(coordinate: Sequence[int], d: int) -> list[int]:
    return [c for i, c in enumerate(coordinate) if i != d]


def _is_split(placement: Any) -> bool:
    return hasattr(placement, "dim") and not placement.is_partial()
