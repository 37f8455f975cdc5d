"""The function `take_over`, which loads parts of a checkpoint of another chain."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.link import Link
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.checkpoint import check_form, check_order
from torchzero_clip.optimizer.state_layout import is_links


def take_over(
    optimizer: ChainRunner,
    state_dict: Mapping[str, Any],
    link: str | None = None,
    *,
    keep: str | Sequence[str] = (),
) -> list[str]:
    """Load state and hyperparameters from a checkpoint of another chain or of a torch optimizer.

    The function loads state and hyperparameters that have the same name in both chains. All other
    state starts from its first values. In a distributed run all ranks must call this function.

    Args:
        optimizer: A `Modular`, a `Clipper` or the handle of `attach`.
        state_dict: The result of the other optimizer's `state_dict()`, with the same number of
            groups and parameters.
        link: The path of the link that gets the state of a torch optimizer, such as "Adam".
        keep: The names of hyperparameters that keep their present values, as in `load_state_dict`.

    Returns:
        The names of the state that was loaded.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, WeightDecay, ZClip, take_over
        >>> model = torch.nn.Linear(10, 1)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> adamw.step()
        >>> opt = Modular(model.parameters(), ZClip(), Adam(), WeightDecay(0.01), LR(1e-3))
        >>> print(take_over(opt, adamw.state_dict(), link="Adam"))
        ['Adam/exp_avg', 'Adam/exp_avg_sq', 'Adam/step']
    """
    if not isinstance(optimizer, ChainRunner):
        raise TypeError(f"take_over: optimizer must be a Modular, got {optimizer!r}")
    check_form(state_dict, optimizer.param_groups)
    for g in range(len(optimizer.param_groups)):
        check_order(g, state_dict["param_groups"], optimizer.param_groups)
    adopter = None if link is None else _link_at(optimizer, link)
    optimizer.init_state()
    merged = optimizer.state_dict()
    pairs: list[tuple[dict[str, Any], Mapping[str, Any]]] = []  # our state and the other state
    for group, other in zip(merged["param_groups"], state_dict["param_groups"], strict=True):
        group.update({key: other[key] for key in group.keys() & other.keys() - RESERVED})
        shared = {key: x for key, x in other.get("chain", {}).items() if "/" in key}
        pairs.append((group["chain"], shared))
        for index, other_index in zip(group["params"], other["params"], strict=True):
            theirs = state_dict["state"].get(other_index, {})
            if adopter is not None:
                theirs = _adopted(adopter, theirs, other)
            ours = dict(merged["state"].get(index, {}))
            merged["state"][index] = ours
            pairs.append((ours, theirs))
    common = {key for ours, theirs in pairs for key in ours.keys() & theirs.keys()}
    known = sorted({key for ours, _ in pairs for key in ours if is_links(key)})
    offered = {key for _, theirs in pairs for key in theirs}
    if known and offered and not common:
        raise ValueError(
            "take_over: the checkpoint and this optimizer have no state in common: the "
            f"checkpoint has {sorted(offered)}, and this optimizer has {known}. If the "
            "checkpoint is from a torch optimizer, pass the name of the transform that receives "
            'the state, such as link="Adam"'
        )
    if adopter is not None:
        _warn_of_dropped(adopter.path, pairs)
    for ours, theirs in pairs:
        for key in ours.keys() & theirs.keys():
            ours[key] = _in_own_dtype(ours[key], copy.deepcopy(theirs[key]))
    optimizer.load_state_dict(merged, keep=keep)
    return sorted(common)


def _link_at(optimizer: ChainRunner, path: str) -> Link:
    """Return the link with a path. Raise ValueError if no link has this path."""
    paths = {link.path: link for link in optimizer.keys.links if link.transforms}
    if path not in paths:
        raise ValueError(f"take_over: link= must be one of {sorted(paths)}, got {path!r}")
    return paths[path]


def _adopted(link: Link, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter from a torch optimizer, under the keys of a link."""
    try:
        own_form = state and isinstance(link.transform, Smoothing)
        adopted = link.transform.adopted(state, group) if own_form else state
    except ValueError as error:
        raise ValueError(f"take_over: link={link.path!r}: {error}") from None
    return {f"{link.path}/{name}": value for name, value in adopted.items()}


def _warn_of_dropped(
    path: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> None:
    """Warn if a torch optimizer has state with one value per element, and a link has no such state.

    For example, `Adam` does not keep the maximum of torch's Adamax. Without this maximum, the first
    steps of `Adam` would be much too long.
    """
    dropped = {
        key.removeprefix(f"{path}/")
        for ours, theirs in pairs
        for key, value in theirs.items()
        if key.startswith(f"{path}/") and key not in ours
        if isinstance(value, Tensor) and value.dim()
    }
    if dropped:
        warn(
            f"take_over: the checkpoint has the state {sorted(dropped)}, but {path} has no such "
            f"state, so it is dropped. The next steps may be much too large unless {path} computes "
            "the same update as the torch optimizer"
        )


def _in_own_dtype(ours: Any, theirs: Any) -> Any:
    """Return a value of another checkpoint in the dtype of this optimizer.

    The dtypes can differ. torch keeps some scalars in float32 if the parameters are float64, and
    keeps the state of bfloat16 parameters in bfloat16.
    """
    both = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    if both and ours.is_floating_point() and theirs.is_floating_point():
        return theirs.to(ours.dtype)
    return theirs
