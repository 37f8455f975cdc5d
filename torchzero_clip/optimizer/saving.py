"""Saving: the contents of a state dict, and the check whether a state is worth saving."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norms import largest
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.sharding.owned_tensors import evenly, owner_of, spread
from torchzero_clip.core.sharding.ranks import rank_and_world
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.tensor_kinds import is_inexact
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.rounding import halves_as_bytes, is_exact, weights_of
from torchzero_clip.optimizer.state_layout import matrix_names

SINCE = "since"
"""The name of a state of guards: the number of steps since the last skipped step."""


def on_saving(optimizer: Any) -> None:
    """Register hooks that act when an optimizer makes a state dict.

    The hooks spread the tensors of owned matrices over the ranks, and convert lower halves to
    bytes. They also make the optimizer record its next step again, so the next steps round exactly
    as they would after loading.
    """
    paths = {link.path for link in optimizer.keys.links if matrix_names(link.transform)}
    if paths:
        optimizer.register_state_dict_post_hook(
            lambda opt, state_dict: _with_spread_matrices(opt, state_dict, paths)
        )
    if optimizer.rounding == "exact":
        optimizer.register_state_dict_post_hook(
            lambda _, state_dict: {**state_dict, "state": halves_as_bytes(state_dict["state"])}
        )
    optimizer.register_state_dict_pre_hook(lambda opt: opt.engine.forget("state_dict()"))


def _with_spread_matrices(
    optimizer: Any, state_dict: dict[str, Any], paths: set[str]
) -> dict[str, Any] | None:
    """Return the state dict with the tensors of owned matrices spread over all ranks.

    Return None if the state dict has no such tensors. All ranks must call this function.

    Args:
        optimizer: The optimizer.
        state_dict: The state dict of the optimizer.
        paths: The paths of the links that keep state of matrices.
    """
    indexes = [index for group in state_dict["param_groups"] for index in group["params"]]
    owned: list[tuple[int, str, Any]] = []
    for index, p in zip(indexes, params_of(optimizer), strict=True):
        layout = layout_of(p)
        if layout is not None and layout.split:
            owned += [
                (index, key, evenly(layout, t.shape))
                for key, t in state_dict["state"].get(index, {}).items()
                if key.rpartition("/")[0] in paths and hasattr(t, "shape") and not _is_spread(t)
            ]
    if not owned:
        return None
    state = dict(state_dict["state"])
    tensors = [state[index][key] for index, key, _ in owned]
    parts = spread(tensors, [layout for *_, layout in owned])
    for (index, key, _), part in zip(owned, parts, strict=True):
        state[index] = {**state[index], key: part}
    return {**state_dict, "state": state}


def _is_spread(t: Any) -> bool:
    """Return whether a tensor is already spread evenly. Loaded tensors are."""
    return layout_of(t) is not None and owner_of(t) is None


def has_rate(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a group has a learning rate other than 0.

    torch makes the template of a checkpoint with a step whose learning rate is 0. This function
    does not read a learning rate in a tensor.
    """
    rates = [group.get("lr") for group in groups]
    return any([rate for rate in rates if not isinstance(rate, Tensor)])


@torch.no_grad()
def safe_to_save(optimizer: Any, steps: int, more: Mapping[Any, Any]) -> bool:
    """Return whether the state is worth keeping: no recent skipped step, and all values finite.

    The function synchronizes with the device once. All ranks return the same answer.

    Args:
        optimizer: The optimizer.
        steps: The number of last steps that no guard may have skipped.
        more: The state of another optimizer. It must be finite too.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"safe_to_save: steps must be an integer of at least 0, got {steps!r}")
    guards = {f"{link.path}/{SINCE}" for link in optimizer.keys.links if link.is_guard}
    tensors = list(_tensors_to_check(optimizer, more, guards))
    flags = [x >= steps for key, x in tensors if key in guards]
    numbers = [x for key, x in tensors if key not in guards]
    flags += [torch.isfinite(largest(batch)).all() for batch in _batches_of(numbers)]
    exact = [p for p in params_of(optimizer) if is_exact(optimizer, p)]
    flags += [weights_of(optimizer, p).isfinite().all() for p in exact]  # one copy at a time
    safe = torch.tensor(True)
    if flags:
        safe = torch.stack([flag.to(flags[0].device) for flag in flags]).all()
    if rank_and_world()[1] > 1:
        safe = safe.to(torch.int32)
        torch.distributed.all_reduce(safe, torch.distributed.ReduceOp.MIN)
    return bool(safe)


def _tensors_to_check(
    optimizer: Any, more: Mapping[Any, Any], guards: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights (except exact weights) and the state, each tensor with a key.

    Some state is not finite before its link receives a gradient. Such state is skipped, except for
    the counts of `guards`.
    """
    unknown = {key for link in optimizer.keys.links for key in _keys_that_begin_unknown(link)}
    for p in params_of(optimizer):
        if not is_exact(optimizer, p):
            yield "", p
    of_groups = [group.get("chain", {}) for group in optimizer.param_groups]
    for state in [*of_groups, *optimizer.state.values(), *more.values()]:
        for key, x in state.items() if isinstance(state, Mapping) else ():
            number = isinstance(x, Tensor) and is_inexact(x)
            if number and (key not in unknown or key in guards):
                yield str(key), x


def _keys_that_begin_unknown(link: Link) -> list[str]:
    """Return the keys of unit state that begins as NaN or infinity, such as an empty window."""
    values = {**link.group_values(), **getattr(link.transform, "init_unit", dict)()}
    first = {f"{link.path}/{name}": torch.as_tensor(x) for name, x in values.items()}
    return [key for key, x in first.items() if not x.isfinite().all()]


def _batches_of(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the local parts of tensors, in one list for each device and dtype."""
    parts = [x for x in map(local, tensors) if x.numel()]
    kinds = [(x.device, x.dtype) for x in parts]
    return [[parts[i] for i in batch] for batch in batches(kinds)]
