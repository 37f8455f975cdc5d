"""State of matrices in a state dict: what owners have, in even parts as any sharded tensor."""

from __future__ import annotations

from typing import Any

from torchzero_clip.core.sharding.held import evenly, owner_of, spread
from torchzero_clip.core.sharding.layout import layout_of
from torchzero_clip.optimizer.state_layout import matrix_names


def share_state(optimizer: Any) -> None:
    """Have the state dicts of an optimizer show the state that owners have, which is collective."""
    paths = {link.path for link in optimizer.keys.links if matrix_names(link.transform)}
    if paths:
        optimizer.register_state_dict_post_hook(lambda opt, made: _shared(opt, made, paths))


def _shared(optimizer: Any, made: dict[str, Any], paths: set[str]) -> dict[str, Any] | None:
    """The state dict with the tensors of owners as parts on all ranks."""
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
