"""Owners: sharded tensors that one rank each works on, so that no work is done twice.

The parts of a tensor go to its owner, which has it whole then, and what the owner makes of it comes
back in parts: one `all_to_all_single` each way for all tensors of one shape. Shards may be uneven
or empty, and nothing is padded. On a mesh of several dims that has all ranks, copies share the
work.
"""

from __future__ import annotations

import functools
import math
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
    """Work on whole tensors, each on the rank that owns it; returns the parts here of the results.

    Args:
        lists: Of each tensor what is here; there may be several lists of tensors that are alike.
        layouts: Of each tensor; those without a route to an owner are gathered on every rank.
        owners: The ranks that `owners_of` gave.
        work: Called with the indexes of some tensors, and for each list with these tensors whole,
            in memory that it may write to; it returns a tensor for each.
    """

    def done(some: list[int]) -> list[Tensor]:
        alike: Any = [layouts[i] for i in some]
        if owners[some[0]] is None:
            every = [[whole_of(parts[i].clone(), layouts[i]) for i in some] for parts in lists]
            return list(map(part_of, work(some, *every), alike))
        exchange = Exchange(alike, [owners[i] for i in some])
        every = [exchange.there([parts[i] for i in some]) for parts in lists]
        made = work([some[k] for k in exchange.mine], *every) if exchange.mine else []
        return exchange.back(made, lists[0][some[0]])

    rows = zip(_ways(layouts), layouts, strict=True)
    kinds = [(way, x.shape) if way and x else None for way, x in rows]
    return in_order(batches(kinds), done)


def owners_of(
    layouts: Sequence[Layout | None],
    costs: Sequence[float],
    held: Sequence[int | None] | None = None,
) -> list[int | None]:
    """The rank of each tensor's owner; None where it is whole on every rank.

    Args:
        layouts: Of each tensor.
        costs: What each is to its owner, by which the loads of ranks are balanced.
        held: The owners that tensors have already.
    """
    ways, held = _ways(layouts), held or [None] * len(layouts)

    def found(some: list[int]) -> Sequence[int | None]:
        if (way := ways[some[0]]) is None:
            return [None] * len(some)
        return owners([costs[i] for i in some], way[1], [held[i] for i in some])

    return in_order(batches(ways), found)


def owners(
    costs: Sequence[float], ranks: Sequence[int], held: Sequence[int | None] | None = None
) -> list[int]:
    """The owner of each tensor: the dearest first, each to the rank that has the least to do."""
    found = list(held or [None] * len(costs))
    load = {k: sum([c for c, r in zip(costs, found, strict=True) if r == k]) for k in ranks}
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = found[i]
        if rank is None:
            found[i] = rank = min(ranks, key=load.__getitem__)
            load[rank] += costs[i]
    return [rank for rank in found if rank is not None]


def _ways(layouts: Sequence[Layout | None]) -> list[tuple[Any, tuple[int, ...]] | None]:
    """The mesh of each tensor that has an owner, and the ranks among which."""
    kinds = [x and (x.mesh, x.split) for x in layouts]
    one = dict(zip(kinds, layouts, strict=True))  # of each kind
    known = {kind: tuple(_ranks(route(x)[0])) for kind, x in one.items() if x}
    return [(kind[0], known[kind]) if kind and known[kind] else None for kind in kinds]


def route(layout: Layout) -> tuple[Any, Coordinates]:
    """The process group that takes a tensor to an owner, and the coordinates of its ranks.

    There are none for a tensor that is whole here, and for one that is split along two dims of a
    mesh that has not all ranks, which share no one group.
    """
    if layout.split and layout.mesh.ndim > 1 and (every := all_coordinates(layout.mesh)):
        return torch.distributed.group.WORLD, every
    if len(layout.split) != 1:
        return None, ()
    dims = dims_of([layout])
    return groups_of(layout.mesh, dims)[0], coordinates_of(layout.mesh, dims)


class Exchange:
    """The way of some tensors on one mesh to their owners and back.

    Args:
        layouts: Of each tensor.
        owners: The rank of the owner of each.
    """

    def __init__(self, layouts: Sequence[Layout], owners: Sequence[Any]) -> None:
        self.group, coordinates = route(layouts[0])
        among = _ranks(self.group)
        self.layouts, self.owners = layouts, [among.index(owner) for owner in owners]
        self.me, self.ranks = torch.distributed.get_rank(self.group), range(len(coordinates))
        self.coordinates = coordinates
        self.places = [_places(layout, coordinates) for layout in layouts]
        self.mine = self._of(self.me)

    def there(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors that this rank owns, from the parts of all that are here."""
        sent = [[parts[k] for k in self._of(r) if self._sends(k, self.me, r)] for r in self.ranks]
        come = [[k for k in self.mine if self._sends(k, r, self.me)] for r in self.ranks]
        sizes = [[self.places[k][r][1] for k in come[r]] for r in self.ranks]
        whole = {k: parts[0].new_empty(self.layouts[k].shape) for k in self.mine}
        for r, pieces in enumerate(self._swap(sent, sizes, parts[0])):
            for k, piece in zip(come[r], pieces, strict=True):
                to = whole[k][self.places[k][r][0]]
                to.copy_(piece.view(to.shape))
        return list(whole.values())

    def back(self, made: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The parts here of all tensors, from those that the owners made."""
        rows = list(zip(self.mine, made, strict=True))
        sent = [[t[self.places[k][r][0]] for k, t in rows] for r in self.ranks]
        sizes = [[self.places[k][self.me][1] for k in self._of(r)] for r in self.ranks]
        parts: dict[int, Tensor] = {}
        for r, pieces in enumerate(self._swap(sent, sizes, like)):
            for k, piece in zip(self._of(r), pieces, strict=True):
                ends = self.layouts[k].extents(self.coordinates[self.me])
                parts[k] = piece.view([stop - start for start, stop in ends])
        return [parts[k] for k in range(len(self.layouts))]

    def _of(self, rank: int) -> list[int]:
        """The tensors that a rank owns."""
        return [k for k, owner in enumerate(self.owners) if owner == rank]

    def _sends(self, k: int, sender: int, owner: int) -> bool:
        """Whether a rank sends its part to the owner: of equal copies the one beside it does."""
        a, b = self.coordinates[sender], self.coordinates[owner]
        return all([a[d] == b[d] for d in range(len(a)) if d not in self.layouts[k].split])

    def _swap(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """What each rank has sent here, as pieces of these sizes."""
        flat = [t.reshape(-1) for some in sent for t in some]
        data = torch.cat(flat) if flat else like.new_empty(0)
        counts = [sum([t.numel() for t in some]) for some in sent]
        out = exchange(data, self.group, list(map(sum, sizes)), counts)
        pieces = iter(out.split([n for some in sizes for n in some]))
        return [[next(pieces) for _ in some] for some in sizes]


def _ranks(group: Any) -> list[int]:
    return [] if group is None else torch.distributed.get_process_group_ranks(group)


@functools.lru_cache(maxsize=4096)
def _places(layout: Layout, coordinates: Coordinates) -> tuple[tuple[tuple[slice, ...], int], ...]:
    """Where the part of each rank lies in the whole tensor, and its number of entries."""
    every = [[slice(*end) for end in layout.extents(c)] for c in coordinates]
    return tuple([(tuple(part), math.prod([x.stop - x.start for x in part])) for part in every])
