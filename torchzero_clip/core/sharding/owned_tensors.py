"""Held: tensors that one rank has whole, and the others know of; and their way into even parts.

Such a tensor is a DTensor on the mesh of its owner alone. In checkpoints it is in even parts, as
any sharded tensor, which distributed checkpointing gathers, cuts anew and hands out.
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
    """A tensor that the rank `owner` has; `whole` there, and `like` tells the others its form."""
    here = torch.empty(0, dtype=like.dtype, device=like.device) if whole is None else whole
    return Layout(mesh_of(like.device.type, owner), (_replicate(),), tuple(like.shape)).wrap(here)


def owner_of(t: Any) -> int | None:
    """The rank that has a tensor; None for one that is here, or in parts."""
    layout = None if t is None else layout_of(t)
    alone = layout is not None and layout.mesh.size() == 1 and not layout.split
    return _rank_of(t.device_mesh) if alone else None


def evenly(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout of a tensor in even parts on the ranks that have the parts of another."""
    from torch.distributed.tensor import Shard

    cut = [Shard(0) if d in layout.split else _replicate() for d in range(layout.mesh.ndim)]
    return Layout(layout.mesh, tuple(cut), tuple(shape))


def spread(held: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """Tensors that owners have, or every rank, in even parts of these layouts: a collective."""
    return _moved(held, layouts, [owner_of(t) for t in held], _spread)


def collect(parts: Sequence[Tensor], layouts: Sequence[Layout], owners: Sequence[Any]) -> Any:
    """Tensors in even parts, whole on these ranks, or on every rank: a collective."""
    return _moved(parts, layouts, owners, _collect)


def _moved(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], owners: Sequence[int | None], move: Any
) -> list[Any]:
    """What `move` makes of tensors, those that share a way together."""
    rows: Any = tensors, layouts, owners
    kinds = [(x.mesh, x.split, t.dtype, rank is None) for t, x, rank in zip(*rows, strict=True)]
    return in_order(batches(kinds), lambda some: move(*[[row[i] for i in some] for row in rows]))


def _spread(held: list[Tensor], layouts: list[Layout], owners: list[Any]) -> list[Tensor]:
    if owners[0] is None:
        return [x.wrap(x.part(t).clone()) for t, x in zip(held, layouts, strict=True)]
    exchange = Exchange(layouts, owners)
    back = exchange.back([local(held[k]) for k in exchange.mine], local(held[0]))
    return [x.wrap(part.clone()) for part, x in zip(back, layouts, strict=True)]


def _collect(parts: list[Tensor], layouts: list[Layout], owners: list[Any]) -> list[Tensor]:
    if owners[0] is None:
        return [x.whole(local(t)) for t, x in zip(parts, layouts, strict=True)]
    exchange = Exchange(layouts, owners)
    whole = dict(zip(exchange.mine, exchange.there(list(map(local, parts))), strict=True))
    return [hold(whole.get(k), t, owners[k]) for k, t in enumerate(parts)]


@functools.lru_cache(maxsize=1024)
def _rank_of(mesh: Any) -> int:
    """The rank of a mesh of one."""
    with without_modes():
        return int(mesh.mesh.item())


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
