"""Replicas: find weights that should be equal on several ranks, and differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchzero_clip.audit.update.fingerprints import fingerprint
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.sharding.layout import layout_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def groups_of_replicas(
    model: nn.Module, params: Mapping[str, Tensor], replicas: ProcessGroup | bool | None
) -> dict[ProcessGroup, list[str]]:
    """Return the names of the parameters that each process group holds copies of.

    Args:
        model: The model. Its parts in DistributedDataParallel are replicas.
        params: The parameters by name. A DTensor is a replica on the dims of its mesh that do not
            split it.
        replicas: A process group whose ranks have equal plain parameters, True for all ranks, or
            None.
    """
    groups: dict[ProcessGroup, list[str]] = {}
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return groups
    in_ddp = dict(_replicated_by_ddp(model))
    for name, p in params.items():
        layout = layout_of(p)
        if layout is None:
            group = in_ddp.get(id(p))
            if replicas is True:
                group = torch.distributed.group.WORLD
            elif replicas:
                group = replicas
            if group is not None:
                groups.setdefault(group, []).append(name)
            continue
        for d, placement in enumerate(layout.placements):
            if placement.is_replicate() and layout.mesh.size(d) > 1:
                groups.setdefault(layout.mesh.get_group(d), []).append(name)
    return groups


def _replicated_by_ddp(model: nn.Module) -> Iterator[tuple[int, ProcessGroup]]:
    """Yield the id and the process group of each parameter that DDP keeps equal."""
    from torch.nn.parallel import DistributedDataParallel

    for wrapper in model.modules():
        if isinstance(wrapper, DistributedDataParallel):
            for name, p in wrapper.module.named_parameters():
                if name not in wrapper.parameters_to_ignore:
                    yield id(p), wrapper.process_group


def drifted(
    groups: Mapping[ProcessGroup, list[str]],
    params: Mapping[str, Tensor],
    before: Mapping[str, int],
) -> Iterator[tuple[str, str]]:
    """Yield the name of each replica that differs between ranks, and since when.

    All ranks of the groups must call this. It needs one collective for each group.

    Args:
        groups: The names of the parameters of each group.
        params: The parameters after the step.
        before: The fingerprints of the parameters before the step.
    """
    for group, names in groups.items():
        rows = [[fingerprint(params[name]), before[name]] for name in names]
        table = gather(torch.tensor(rows, device=params[names[0]].device), group)
        for i, name in enumerate(names):
            after, earlier = table[:, i].T.tolist()
            ranks = _first_two_kinds(after)
            if not ranks:
                continue
            since = "already before the step"
            if len(set(earlier)) == 1:
                since = "since this step"
            yield name, f"differs between the ranks {ranks} of its replicas, {since}"


def _first_two_kinds(numbers: list[int]) -> str:
    """Return the first rank, and the first rank with another number. "" if all are equal."""
    other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    return "" if other is None else f"0 and {other}"
