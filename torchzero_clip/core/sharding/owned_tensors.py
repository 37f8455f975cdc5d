"""Owned tensors: one rank stores the whole tensor. Other ranks store only its shape and owner.

Such a tensor is a DTensor on a mesh that contains only the owner. Checkpoints store the tensor in
even parts, like any sharded tensor. So distributed checkpointing can gather, reshard and load it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.sharding.layout import Layout, layout_of, local
from torchzero_clip.core.sharding.owners import Exchange
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.torch_private import mesh_of, without_modes


def hold(whole: Tensor | None, like: Any, owner: int) -> Tensor:
    """Return an owned tensor.

    `whole` is the tensor on its owner, and None on the other ranks. `like` has the shape, the dtype
    and the device of the whole tensor.
    """
    here = torch.empty(0, dtype=like.dtype, device=like.device) if whole is None else whole
    return Layout(mesh_of(like.device.type, owner), (_replicate(),), tuple(like.shape)).wrap(here)


def owner_of(t: Any) -> int | None:
    """Return the owner of a tensor, or None for a plain tensor and for shards."""
    layout = None if t is None else layout_of(t)
    alone = layout is not None and layout.mesh.size() == 1 and not layout.split
    return _rank_of(t.device_mesh) if alone else None


def evenly(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor in even parts, on the ranks of another layout's shards."""
    from torch.distributed.tensor import Shard

    cut = [Shard(0) if d in layout.split else _replicate() for d in range(layout.mesh.ndim)]
    return Layout(layout.mesh, tuple(cut), tuple(shape))


def spread(tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """Split owned tensors, or tensors that every rank has, into even parts by a collective."""
    return _moved(tensors, layouts, [owner_of(t) for t in tensors], _spread)


def collect(parts: Sequence[Tensor], layouts: Sequence[Layout], owners: Sequence[Any]) -> Any:
    """Convert tensors in even parts to owned tensors, or to whole tensors if the owner is None.

    This is a collective.
    """
    return _moved(parts, layouts, owners, _collect)


def _moved(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], owners: Sequence[int | None], move: Any
) -> list[Any]:
    """Call `move` for tensors that can share an exchange, and return all results in order."""
    rows: Any = tensors, layouts, owners
    kinds = [(x.mesh, x.split, t.dtype, rank is None) for t, x, rank in zip(*rows, strict=True)]
    return in_order(batches(kinds), lambda some: move(*[[row[i] for i in some] for row in rows]))


def _spread(tensors: list[Tensor], layouts: list[Layout], owners: list[Any]) -> list[Tensor]:
    if owners[0] is None:
        return [x.wrap(x.part(t).clone()) for t, x in zip(tensors, layouts, strict=True)]
    exchange = Exchange(layouts, owners)
    parts = exchange.from_owners([local(tensors[k]) for k in exchange.mine], local(tensors[0]))
    return [x.wrap(part.clone()) for part, x in zip(parts, layouts, strict=True)]


def _collect(parts: list[Tensor], layouts: list[Layout], owners: list[Any]) -> list[Tensor]:
    if owners[0] is None:
        return [x.whole(local(t)) for t, x in zip(parts, layouts, strict=True)]
    exchange = Exchange(layouts, owners)
    tensors = exchange.to_owners(list(map(local, parts)))
    whole = dict(zip(exchange.mine, tensors, strict=True))
    return [hold(whole.get(k), t, owners[k]) for k, t in enumerate(parts)]


@functools.lru_cache(maxsize=1024)
def _rank_of(mesh: Any) -> int:
    """Return the rank of a mesh with a single rank."""
    with without_modes():
        return int(mesh.mesh.item())


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
