"""Saving: what a state dict shows, and whether what an optimizer holds is worth a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norms import largest
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.sharding.owned_tensors import evenly, owner_of, spread
from torchzero_clip.core.stacks import batches
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.rounding import is_exact, shown_halves, weights_of
from torchzero_clip.optimizer.state_layout import matrix_names

SINCE = "since"
"""The state of guards that counts the steps since one was skipped."""


def on_saving(optimizer: Any) -> None:
    """Have the state dicts of an optimizer show what owners have; the steps behind one are done
    anew, bit for bit as they are where it is loaded.
    """
    paths = {link.path for link in optimizer.keys.links if matrix_names(link.transform)}
    if paths:
        optimizer.register_state_dict_post_hook(lambda opt, made: _shared(opt, made, paths))
    if optimizer.rounding == "exact":
        optimizer.register_state_dict_post_hook(
            lambda _, made: {**made, "state": shown_halves(made["state"])}
        )
    optimizer.register_state_dict_pre_hook(lambda opt: opt.engine.forget("state_dict()"))


def _shared(optimizer: Any, made: dict[str, Any], paths: set[str]) -> dict[str, Any] | None:
    """The state dict with the tensors of owners as parts on all ranks, which is collective."""
    theirs = [index for group in made["param_groups"] for index in group["params"]]
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    found: list[tuple[int, str, Any]] = []
    for index, p in zip(theirs, ours, strict=True):
        layout = layout_of(p)
        if layout is not None and layout.split:
            found += [
                (index, key, evenly(layout, t.shape))
                for key, t in made["state"].get(index, {}).items()
                if key.rpartition("/")[0] in paths and hasattr(t, "shape") and not _shown(t)
            ]
    if not found:
        return None
    state = dict(made["state"])
    parts = spread([state[i][key] for i, key, _ in found], [layout for *_, layout in found])
    for (i, key, _), part in zip(found, parts, strict=True):
        state[i] = {**state[i], key: part}
    return {**made, "state": state}


def _shown(t: Any) -> bool:
    """Whether a tensor is in even parts already, as one that was loaded."""
    return layout_of(t) is not None and owner_of(t) is None


def has_rate(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group has a rate that is not 0, as in the step that torch takes for the template of
    a checkpoint; one in a tensor is not read.
    """
    rates = [group.get("lr") for group in groups]
    return any([rate for rate in rates if not isinstance(rate, Tensor)])


@torch.no_grad()
def safe_to_save(
    optimizer: Any, links: Sequence[Link], steps: int, more: Mapping[Any, Any]
) -> bool:
    """Whether no guard skipped one of the last steps, and all weights and state are finite.

    `more` is state that another optimizer keeps. It waits for the device once, and all ranks agree.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"safe_to_save: steps must be an integer at least 0, got {steps!r}")
    guards = {f"{link.path}/{SINCE}" for link in links if is_guard(link)}
    held = list(_held(optimizer, links, more, guards))
    flags = [x >= steps for key, x in held if key in guards]
    numbers = [x for key, x in held if key not in guards]
    flags += [torch.isfinite(largest(row)).all() for row in _alike(numbers)]
    for p in filter(partial(is_exact, optimizer), params_of(optimizer)):
        flags.append(weights_of(optimizer, p).isfinite().all())  # in float32, one at a time
    home = flags[0].device if flags else torch.device("cpu")
    safe = torch.stack([flag.to(home) for flag in flags]).all() if flags else torch.tensor(True)
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
        safe = safe.to(torch.int32)
        ranks.all_reduce(safe, ranks.ReduceOp.MIN)
    return bool(safe)


def is_guard(link: Link) -> bool:
    """Return whether the link judges steps, and counts those since the last one that it skipped."""
    return getattr(link.transform, "place", "") == "first"


def _held(
    optimizer: Any, links: Sequence[Link], more: Mapping[Any, Any], guards: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, except exact ones, and the state, each tensor with its key.

    State that is not finite before its link has seen anything is left out, except the counts of
    `guards`.
    """
    unknown = {key for link in links for key in _unknown(link)}
    for p in params_of(optimizer):
        if not is_exact(optimizer, p):
            yield "", p
    rows = [group.get("chain", {}) for group in optimizer.param_groups]
    for row in [*rows, *optimizer.state.values(), *more.values()]:
        for key, x in row.items() if isinstance(row, Mapping) else ():
            number = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
            if number and (key not in unknown or key in guards):
                yield str(key), x


def _unknown(link: Link) -> list[str]:
    """The keys of state of units that begins as NaN or infinite, as an empty window does."""
    made = {**link.group_values(), **getattr(link.transform, "init_unit", dict)()}
    begins = {f"{link.path}/{name}": torch.as_tensor(x) for name, x in made.items()}
    return [key for key, x in begins.items() if not x.isfinite().all()]


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and dtype, of the parts that are here."""
    here = [x for x in map(local, tensors) if x.numel()]
    kinds = [(x.device, x.dtype) for x in here]
    return [[here[i] for i in some] for some in batches(kinds)]
