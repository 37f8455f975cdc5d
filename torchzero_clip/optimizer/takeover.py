"""take_over: what the checkpoint of another chain has of this one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.link import Link
from torchzero_clip.core.traits import Smoothing
from torchzero_clip.optimizer.checkpoint import check_form
from torchzero_clip.optimizer.modular import Modular
from torchzero_clip.optimizer.state_layout import is_links


def take_over(
    optimizer: Modular,
    state_dict: Mapping[str, Any],
    link: str | None = None,
    *,
    keep: str | Sequence[str] = (),
) -> list[str]:
    """Load what the checkpoint of another chain, or of an optimizer of torch, has of this chain.

    What has the same name in both goes over, state and live values; the rest begins anew. In a
    distributed run all ranks must call it.

    Args:
        optimizer: A `Modular`, a `Clipper` or the handle of `attach`.
        state_dict: What `state_dict()` of the other gave, with as many groups and parameters.
        link: The path of the link that takes the state of an optimizer of torch, as "Adam".
        keep: Live values that stay as they were given here, as in `load_state_dict`.

    Returns:
        The names of the state that went over.

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
    if not isinstance(optimizer, Modular):
        raise TypeError(f"take_over: takes a Modular, got {optimizer!r}")
    check_form(state_dict, optimizer.param_groups)
    taker = None if link is None else _link(optimizer, link)
    optimizer.init_state()
    mine = optimizer.state_dict()
    rows: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    for group, other in zip(mine["param_groups"], state_dict["param_groups"], strict=True):
        group.update({key: other[key] for key in group.keys() & other.keys() - RESERVED})
        rows.append((group["chain"], {k: x for k, x in other.get("chain", {}).items() if "/" in k}))
        for index, theirs in zip(group["params"], other["params"], strict=True):
            held = state_dict["state"].get(theirs, {})
            if taker is not None:
                held = _adopted(taker, held, other)
            state = mine["state"][index] = dict(mine["state"].get(index, {}))
            rows.append((state, held))
    taken = {key for held, theirs in rows for key in held.keys() & theirs.keys()}
    known = sorted({key for held, _ in rows for key in held if is_links(key)})
    if known and not taken and any([theirs for _, theirs in rows]):
        raise ValueError(
            f"take_over: the checkpoint has {sorted({k for _, theirs in rows for k in theirs})}, "
            f"this chain keeps {known}: no name is in both; for the state of an optimizer of torch "
            'give the link that takes it, as link="Adam"'
        )
    for held, theirs in rows:
        for key in held.keys() & theirs.keys():
            held[key] = _like(held[key], copy.deepcopy(theirs[key]))
    optimizer.load_state_dict(mine, keep=keep)
    return sorted(taken)


def _link(optimizer: Modular, path: str) -> Link:
    """Return the link with a path; raise ValueError if there is none."""
    paths = {link.path: link for link in optimizer.keys.links if link.transforms}
    if path not in paths:
        raise ValueError(f"take_over: no link has the path {path!r}, only {sorted(paths)}")
    return paths[path]


def _adopted(link: Link, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter in an optimizer of torch under the keys of a link."""
    try:
        own_form = state and isinstance(link.transform, Smoothing)
        adopted = link.transform.adopted(state, group) if own_form else state
    except ValueError as error:
        raise ValueError(f"take_over: link={link.path!r}: {error}") from None
    return {f"{link.path}/{name}": value for name, value in adopted.items()}


def _like(mine: Any, theirs: Any) -> Any:
    """Return a value of another checkpoint in the dtype that it has here.

    torch keeps some scalars in float32 where the parameters are float64, and state of bfloat16
    parameters in bfloat16.
    """
    both = isinstance(mine, Tensor) and isinstance(theirs, Tensor)
    if both and mine.is_floating_point() and theirs.is_floating_point():
        return theirs.to(mine.dtype)
    return theirs
