"""Owners: one rank processes each sharded tensor, so that no work is done twice.

The shards of a tensor go to its owner, which then has the whole tensor. The owner sends the result
back in shards. Each direction is one `all_to_all_single` for all tensors of one shape. Shards may
be uneven or empty. Nothing is padded. If a mesh of several dims contains all ranks, replicas share
the work.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.sharding.collectives import exchange
from torchzero_clip.core.sharding.layout import Layout, part_of, whole_of
from torchzero_clip.core.sharding.ranks import all_coordinates, coordinates_of, dims_of, groups_of
from torchzero_clip.core.stacks import batches, in_order

Coordinates = tuple[tuple[int, ...], ...]
Work = Callable[..., list[Tensor]]


def by_owners(
    lists: Sequence[Sequence[Tensor]],
    layouts: Sequence[Layout | None],
    owners: Sequence[int | None],
    work: Work,
) -> list[Tensor]:
    """Process whole tensors, each on its owner, and return this rank's shards of the results.

    Args:
        lists: One or more lists with this rank's shard of each tensor. The tensors at one index
            have the same layout.
        layouts: The layout of each tensor.
        owners: The owner of each tensor, from `owners_of`. A tensor without an owner is gathered
            and processed on every rank.
        work: A function that processes whole tensors. Its arguments are the indices of some
            tensors, and for each list these tensors as a whole. The function may change the tensors
            in place. It returns a tensor for each index.
    """

    def results(indices: list[int]) -> list[Tensor]:
        alike: Any = [layouts[i] for i in indices]
        if owners[indices[0]] is None:
            whole = [[whole_of(parts[i].clone(), layouts[i]) for i in indices] for parts in lists]
            return list(map(part_of, work(indices, *whole), alike))
        exchange = Exchange(alike, [owners[i] for i in indices])
        whole = [exchange.to_owners([parts[i] for i in indices]) for parts in lists]
        made = work([indices[k] for k in exchange.mine], *whole) if exchange.mine else []
        return exchange.from_owners(made, lists[0][indices[0]])

    both = zip(_routes(layouts), layouts, strict=True)
    kinds = [(route, layout.shape) if route and layout else None for route, layout in both]
    return in_order(batches(kinds), results)


def owners_of(
    layouts: Sequence[Layout | None],
    costs: Sequence[float],
    known: Sequence[int | None] | None = None,
) -> list[int | None]:
    """Return the owner of each tensor, or None for a tensor that every rank processes.

    Args:
        layouts: The layout of each tensor.
        costs: The cost of each tensor for its owner. The loads of the ranks are balanced by cost.
        known: The owners that tensors already have.
    """
    routes = _routes(layouts)
    known = known or [None] * len(layouts)

    def chosen(indices: list[int]) -> Sequence[int | None]:
        if (route := routes[indices[0]]) is None:
            return [None] * len(indices)
        return owners([costs[i] for i in indices], route[1], [known[i] for i in indices])

    return in_order(batches(routes), chosen)


def owners(
    costs: Sequence[float], ranks: Sequence[int], known: Sequence[int | None] | None = None
) -> list[int]:
    """Return the owner of each tensor.

    The most expensive tensors are assigned first, each to the rank with the least load.
    """
    chosen = list(known or [None] * len(costs))
    load = {k: sum([c for c, r in zip(costs, chosen, strict=True) if r == k]) for k in ranks}
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = chosen[i]
        if rank is None:
            chosen[i] = rank = min(ranks, key=load.__getitem__)
            load[rank] += costs[i]
    return [rank for rank in chosen if rank is not None]


def _routes(layouts: Sequence[Layout | None]) -> list[tuple[Any, tuple[int, ...]] | None]:
    """Return the mesh of each tensor that can have an owner, and the ranks that may own it."""
    kinds = [x and (x.mesh, x.split) for x in layouts]
    examples = dict(zip(kinds, layouts, strict=True))
    ranks = {kind: tuple(_ranks(route(x)[0])) for kind, x in examples.items() if x}
    return [(kind[0], ranks[kind]) if kind and ranks[kind] else None for kind in kinds]


def route(layout: Layout) -> tuple[Any, Coordinates]:
    """Return the process group that brings a tensor to an owner, and its ranks' coordinates.

    Return None and an empty tuple if the tensor is not split. Return the same if the tensor is
    split along two dims of a mesh that does not contain all ranks. In this case, the ranks of the
    tensor share no process group.
    """
    if layout.split and layout.mesh.ndim > 1 and (every := all_coordinates(layout.mesh)):
        return torch.distributed.group.WORLD, every
    if len(layout.split) != 1:
        return None, ()
    dims = dims_of([layout])
    return groups_of(layout.mesh, dims)[0], coordinates_of(layout.mesh, dims)


class Exchange:
    """The communication that brings tensors on one mesh to their owners, and results back.

    Args:
        layouts: The layout of each tensor.
        owners: The rank of the owner of each tensor.

    Attributes:
        mine: The indices of the tensors that this rank owns.
    """

    def __init__(self, layouts: Sequence[Layout], owners: Sequence[Any]) -> None:
        self.group, self.coordinates = route(layouts[0])
        among = _ranks(self.group)
        self.layouts = layouts
        self.owners = [among.index(owner) for owner in owners]
        self.me = torch.distributed.get_rank(self.group)
        self.ranks = range(len(self.coordinates))
        self.places = [_places(layout, self.coordinates) for layout in layouts]
        self.mine = self._owned_by(self.me)

    def to_owners(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole tensors that this rank owns, from this rank's shards of all tensors."""
        sent: list[list[Tensor]] = []
        targets: list[list[Tensor]] = []  # where the shards from each rank go
        whole = {k: parts[0].new_empty(self.layouts[k].shape) for k in self.mine}
        for r in self.ranks:
            sent.append([parts[k] for k in self._owned_by(r) if self._sends(k, self.me, r)])
            own = [k for k in self.mine if self._sends(k, r, self.me)]
            targets.append([whole[k][self.places[k][r]] for k in own])
        shapes = [[target.shape for target in row] for row in targets]
        pieces = self._swap(sent, shapes, parts[0])
        for target, piece in zip(itertools.chain(*targets), pieces, strict=True):
            target.copy_(piece)
        return list(whole.values())

    def from_owners(self, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's shards of all results, from the results that this rank made."""
        rows = list(zip(self.mine, made, strict=True))
        sent = [[t[self.places[k][r]] for k, t in rows] for r in self.ranks]
        owned = list(map(self._owned_by, self.ranks))
        shapes = [[_shape(self.places[k][self.me]) for k in row] for row in owned]
        parts = dict(zip(itertools.chain(*owned), self._swap(sent, shapes, like), strict=True))
        return [parts[k] for k in range(len(self.layouts))]

    def _owned_by(self, rank: int) -> list[int]:
        """Return the tensors that a rank owns."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def _sends(self, k: int, sender: int, owner: int) -> bool:
        """Return whether a rank sends its shard to the owner.

        Several ranks may have equal shards. Then only the rank in the owner's replica sends its
        shard.
        """
        a = self.coordinates[sender]
        b = self.coordinates[owner]
        return all([a[d] == b[d] for d in range(len(a)) if d not in self.layouts[k].split])

    def _swap(
        self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]], like: Tensor
    ) -> list[Tensor]:
        """Send tensors to each rank, and return the tensors of these shapes from each rank."""
        flat = [t.reshape(-1) for tensors in sent for t in tensors]
        data = torch.cat(flat) if flat else like.new_empty(0)
        counts = [sum(map(Tensor.numel, tensors)) for tensors in sent]
        sizes = [sum([shape.numel() for shape in row]) for row in shapes]
        every = list(itertools.chain(*shapes))
        pieces = exchange(data, self.group, sizes, counts).split([x.numel() for x in every])
        return [piece.view(shape) for piece, shape in zip(pieces, every, strict=True)]


def _ranks(group: Any) -> list[int]:
    return [] if group is None else torch.distributed.get_process_group_ranks(group)


@functools.lru_cache(maxsize=4096)
def _places(layout: Layout, coordinates: Coordinates) -> list[tuple[slice, ...]]:
    """Return the place of each rank's shard in the whole tensor."""
    return [tuple([slice(*end) for end in layout.extents(c)]) for c in coordinates]


def _shape(place: tuple[slice, ...]) -> torch.Size:
    """Return the shape of a shard at this place."""
    return torch.Size([along.stop - along.start for along in place])
