"""Layout: how the parts of a DTensor lie on a mesh of processes, and the part that is here."""

from __future__ import annotations

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
    """How the parts of one tensor lie on a mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @property
    def split(self) -> frozenset[int]:
        """The dims of the mesh that the tensor is split over."""
        placed = enumerate(self.placements)
        return frozenset([i for i, p in placed if hasattr(p, "dim") and not p.is_partial()])

    def extents(self, coordinate: Sequence[int]) -> list[tuple[int, int]]:
        """For each dim of the tensor, from where to where the part at a coordinate goes.

        Tensor parallelism splits before FSDP does, though its mesh dim comes after: torch gives
        FSDP's a placement of another kind then.
        """
        out = [(0, n) for n in self.shape]
        strided = [i for i in self.split if is_strided(self.placements[i])]
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

        size, stride = torch.Size(self.shape), torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=size, stride=stride
        )

    def whole(self, part: Tensor) -> Tensor:
        """The tensor of which this is the part here: a collective, and memory for all of it."""
        out = part.new_zeros(self.shape)
        self.part(out).copy_(part)
        for d in sorted(self.split):
            out = sum_(out, self.mesh.get_group(d))
        return out


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a DTensor; None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    sharded: Any = tensor
    return Layout(sharded.device_mesh, tuple(sharded.placements), tuple(sharded.shape))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is here, in its own memory; a plain tensor is all here."""
    (part,) = parts([tensor])
    if is_sharded(part):
        with torch.no_grad():
            part = part.to_local()
    return part.wait() if hasattr(part, "wait") else part  # it may be on its way here


def placements(tensor: Tensor) -> Any:
    """How a DTensor lies on its mesh; None of a plain tensor."""
    return getattr(tensor, "placements", None)


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of tensors that are here."""
    found = parts(tensors)
    return found if all_plain(found) else list(map(local, tensors))


def whole_of(part: Tensor, layout: Layout | None) -> Tensor:
    """The tensor of which this is the part here; one without a layout is all here."""
    return part if layout is None else layout.whole(part)


def part_of(whole: Tensor, layout: Layout | None) -> Tensor:
    """The part here of a whole tensor."""
    return whole if layout is None else layout.part(whole)


def summed(tensor: Any) -> Any:
    """Return a tensor whose partial sums are summed over the ranks; others as they are."""
    placed = placements(tensor) or ()
    if not any([x.is_partial() for x in placed]):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if x.is_partial() else x for x in placed])


def full(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered from all ranks."""
    tensor = summed(tensor)
    return whole_of(local(tensor), layout_of(tensor))


def aligned_grads(params: Sequence[Tensor], place: Any) -> list[Tensor | None]:
    """The gradients of parameters, sharded as these are, from their place.

    Tensor parallelism may leave a gradient partly summed.
    """
    if not all_plain(params):
        for p in params:
            grad, placed = place.of(p), placements(p)
            if grad is not None and placed is not None and placements(grad) != placed:
                place.put(p, grad.redistribute(placements=placed))
    return [p.grad for p in params] if place.usual else list(map(place.of, params))


def refuse_flat(params: Sequence[Tensor]) -> None:
    """Raise a sentence for the flat shards of FSDP1, of which no norm is right."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    if any([is_flat(param) for param in params]):
        raise TypeError(
            "FullyShardedDataParallel keeps parameters as flat pieces, whose norms are not those "
            "of the parameters: wrap the model with torch.distributed.fsdp.fully_shard instead"
        )
