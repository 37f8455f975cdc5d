"""Layout: how the shards of a DTensor are placed on a mesh of ranks, and the shard of this rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.sharding.collectives import sum_
from torchzero_clip.core.tensor_kinds import all_plain, is_sharded
from torchzero_clip.core.torch_private import is_flat, is_strided, parts


@dataclass(frozen=True)
class Layout:
    """How the shards of one tensor are placed on a mesh of ranks.

    Args:
        mesh: The DeviceMesh.
        placements: The placement of the tensor on each dim of the mesh.
        shape: The shape of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def split(self) -> frozenset[int]:
        """The dims of the mesh that the tensor is split over."""
        placed = enumerate(self.placements)
        return frozenset([i for i, p in placed if hasattr(p, "dim") and not p.is_partial()])

    @property
    def shard_count(self) -> int:
        """The number of shards. Ranks that store equal shards count once."""
        return math.prod([self.mesh.size(i) for i in self.split])

    def extents(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """Return the range of a shard in each dim of the tensor. `coordinate` locates its rank.

        Tensor parallelism splits a tensor before FSDP does, although its mesh dim comes after
        FSDP's. torch marks the placement of FSDP as strided in this case.
        """
        extents = [(0, n) for n in self.shape]
        strided = [i for i in self.split if is_strided(self.placements[i])]
        for i in sorted(self.split - set(strided)) + sorted(strided, reverse=True):
            dim = self.placements[i].dim
            start, stop = extents[dim]
            size = -(-(stop - start) // self.mesh.size(i))
            first = min(start + size * coordinate[i], stop)
            extents[dim] = (first, min(first + size, stop))
        return extents

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole tensor. Dims of size 1 stay as they are."""
        ends = enumerate(self.extents(self.mesh.get_coordinate()))
        here = [slice(*end) if whole.shape[d] == self.shape[d] else slice(None) for d, end in ends]
        return whole[tuple(here)]

    def wrap(self, part: Tensor) -> Tensor:
        """Return a DTensor whose shard on this rank is `part`."""
        from torch.distributed.tensor import DTensor

        size = torch.Size(self.shape)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=size, stride=stride
        )

    def same_places(self, other: Layout | None) -> bool:
        """Return whether another layout has the same placements on a mesh of the same shape.

        The meshes may differ in other ways. For example, a mesh from a file is another object.
        """
        if other is None:
            return False
        return (self.mesh.shape, self.placements) == (other.mesh.shape, other.placements)

    def whole(self, part: Tensor) -> Tensor:
        """Gather the shards of all ranks into a whole tensor in new memory, by a collective."""
        whole = part.new_zeros(self.shape)
        self.part(whole).copy_(part)
        for d in sorted(self.split):
            whole = sum_(whole, self.mesh.get_group(d))
        return whole


def layout_of(tensor: Tensor) -> Layout | None:
    """Return the layout of a DTensor, or None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    return Layout(sharded.device_mesh, tuple(sharded.placements), tuple(sharded.shape))


def described(layout: Layout | None) -> str:
    """Return words about a layout, for an error message."""
    if layout is None:
        return "a plain tensor"
    return f"a DTensor with {layout.placements} on a mesh of shape {layout.mesh.shape}"


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, without a copy. Return a plain tensor itself."""
    (part,) = parts([tensor])
    return part.wait() if hasattr(part, "wait") else part  # a collective may still bring it


def placements(tensor: Tensor) -> Any:
    """Return the placements of a DTensor, or None for a plain tensor."""
    return getattr(tensor, "placements", None)


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the shards of tensors on this rank, and plain tensors themselves."""
    shards = parts(tensors)
    return shards if all_plain(shards) else list(map(local, tensors))


def whole_of(part: Tensor, layout: Layout | None) -> Tensor:
    """Gather the whole tensor from shards. Without a layout, the part is the whole tensor."""
    return part if layout is None else layout.whole(part)


def part_of(whole: Tensor, layout: Layout | None) -> Tensor:
    """Return this rank's shard of a whole tensor. Without a layout, return the whole tensor."""
    return whole if layout is None else layout.part(whole)


def in_shards(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Return a DTensor with a copy of this rank's shard of a whole tensor.

    Return the tensor itself if it is a DTensor already, or if there is no layout.
    """
    if layout is None or is_sharded(tensor):
        return tensor
    return layout.wrap(layout.part(tensor).clone())


def summed(tensor: Any) -> Any:
    """Return a DTensor with its partial sums summed over the ranks, or any other tensor itself."""
    placed = placements(tensor) or ()
    if not any([x.is_partial() for x in placed]):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if x.is_partial() else x for x in placed])


def full(tensor: Tensor) -> Tensor:
    """Gather a DTensor from all ranks."""
    tensor = summed(tensor)
    return whole_of(local(tensor), layout_of(tensor))


def aligned_grads(params: Sequence[Tensor], place: Any) -> list[Tensor | None]:
    """Return the gradients of parameters, sharded like the parameters.

    Tensor parallelism may leave a gradient partially summed. `place` is a GradPlace.
    """
    if not all_plain(params):
        for p in params:
            grad = place.of(p)
            placed = placements(p)
            if grad is not None and placed is not None and placements(grad) != placed:
                _refuse_misplaced(p, grad, place)
                place.put(p, grad.redistribute(placements=placed))
    return [p.grad for p in params] if place.usual else list(map(place.of, params))


def _refuse_misplaced(p: Tensor, grad: Tensor, place: Any) -> None:
    """Raise TypeError if the step cannot shard a gradient like its parameter."""
    if placements(grad) is None:
        raise TypeError(
            f"the parameter of shape {tuple(p.shape)} is a DTensor, so its gradient must be a "
            f"DTensor, got a plain tensor of shape {tuple(grad.shape)}: wrap the local gradient "
            "with DTensor.from_local(grad, p.device_mesh, p.placements, shape=p.shape, "
            "stride=p.stride())"
        )
    if callable(place.given) and place.own(p) is not None:
        raise TypeError(
            f"grad={place.given!r} returned a gradient with the placements {placements(grad)} for "
            f"a parameter with the placements {placements(p)}: return "
            "grad.redistribute(placements=p.placements)"
        )


def refuse_flat(params: Sequence[Tensor]) -> None:
    """Raise TypeError for the flat shards of FSDP1. Their norms are not norms of parameters."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    if any([is_flat(param) for param in params]):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) is not supported, because it flattens parameters, so "
            "their norms cannot be computed: use torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
