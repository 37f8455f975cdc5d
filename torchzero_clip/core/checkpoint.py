"""Checks of a state dict before it is loaded, and the dtypes that torch's loading changes."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.bucket import statistic
from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.hyper import Names
from torchzero_clip.core.transform import Link, Transform


def fingerprints(links: Sequence[Link]) -> dict[str, Any]:
    """Numbers that tell two chains apart: their links, and their fixed arguments."""
    names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
    fixed = [f"{k}={v!r}" for link in links for k, v in sorted(_fixed(link.transform).items())]
    return {
        "structure": zlib.crc32("\n".join(names).encode()),
        "settings": zlib.crc32("\n".join(fixed).encode()),
    }


def check_checkpoint(
    given: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], names: Names, chain: str
) -> None:
    """Raise a sentence unless every value has the name, shape and dtype that it has here."""
    groups = given["param_groups"]
    ours = [len(group["params"]) for group in param_groups]
    theirs = [len(group["params"]) for group in groups]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has groups of {theirs} parameters, this optimizer of {ours}"
        )
    mine = fingerprints(names.links)
    changed = False
    for g, group in enumerate(groups):
        shared = group.get("chain")
        if not isinstance(shared, dict):
            raise ValueError(
                f"group {g} of the checkpoint has no 'chain': it was saved by another kind of "
                "optimizer, whose state this chain cannot read"
            )
        if shared.get("structure") != mine["structure"]:
            raise ValueError(
                f"the checkpoint was saved by another chain, with {_contents(given, group)}; this "
                f"one is {chain}"
            )
        if missing := set(names.defaults) - set(group):
            raise ValueError(f"group {g} of the checkpoint lacks {sorted(missing)}")
        changed = changed or shared.get("settings") != mine["settings"]
        _check_shared(g, shared, param_groups[g]["params"], names)
    for index, p in _numbered(groups, param_groups):
        if given["state"].get(index):
            _check_state(f"parameter {index}", given["state"][index], p, names)
    if changed:
        warnings.warn(
            f"the checkpoint was saved by a chain with other fixed arguments than {chain}",
            stacklevel=5,
        )


def restore_state(
    given: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    names: Names,
) -> None:
    """Give state its own dtype back: torch casts it to the parameter's."""
    for index, p in _numbered(given["param_groups"], param_groups):
        for key, value in given["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                state[p][key] = value.to(device=p.device)
            else:
                layouts = [link.layout(p) for link in names.links]
                example = next(row[key] for row in layouts if key in row)
                state[p][key] = torch.full_like(example, value, device=p.device)


def _contents(given: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """What a checkpoint of another chain holds, to tell which it was."""
    live = sorted(set(group) - RESERVED)
    held = {key.rpartition("/")[0] for held in given["state"].values() for key in held}
    held |= {key.rpartition("/")[0] for key in group["chain"] if "/" in key}
    return f"hyperparameters {live} and state of {sorted(held)}"


def _check_state(where: str, held: Mapping[str, Any], p: Tensor, names: Names) -> None:
    left = set(held)
    for link in names.links:
        expected = link.layout(p)
        if left.isdisjoint(expected):
            continue
        rule = link.transform
        numbers = list(getattr(rule, "init_unit", dict)())  # as wide as the unit's widest
        for key, example in expected.items():
            if key not in held:
                raise ValueError(f"the checkpoint lacks {key!r} of {where}")
            own = key.rpartition("/")[2] not in numbers
            _check_value(where, key, held[key], example, dtype=own)
        left -= expected.keys()
    if left:
        raise ValueError(f"the checkpoint has {sorted(left)} for {where}, which no link makes")


def _check_shared(
    g: int, shared: Mapping[str, Any], params: Sequence[Tensor], names: Names
) -> None:
    """The part that is kept once for a group: numbers, and what rules of that scope make."""
    where = f"group {g}"
    for link in names.links:
        for name, value in link.shared_values().items():
            key = f"{link.path}/{name}"
            if params and key in shared:
                _check_value(where, key, shared[key], statistic(value, params[0]), dtype=False)
    paths = tuple(f"{link.path}/" for link in names.links)
    strange = [k for k in shared if k not in ("structure", "settings") and not k.startswith(paths)]
    if strange:
        raise ValueError(f"the checkpoint has {sorted(strange)} for {where}, which no link makes")


def _check_value(where: str, key: str, value: Any, example: Tensor, dtype: bool = True) -> None:
    if not isinstance(value, Tensor):
        if example.dim() or not isinstance(value, (int, float)):
            raise ValueError(
                f"the checkpoint has {value!r} where {key!r} of {where} is a tensor of shape "
                f"{tuple(example.shape)}"
            )
    elif value.shape != example.shape:
        raise ValueError(
            f"the checkpoint has shape {tuple(value.shape)} for {key!r} of {where}, here it is "
            f"{tuple(example.shape)}"
        )
    elif dtype and value.dtype != example.dtype:
        raise ValueError(
            f"the checkpoint has dtype {value.dtype} for {key!r} of {where}, here it is "
            f"{example.dtype}"
        )


def _fixed(tfm: Any) -> dict[str, Any]:
    """The arguments that cannot change; a function counts by its name."""
    fields = {name: getattr(tfm, name) for name in tfm.__dataclass_fields__ if name not in tfm.live}
    inner = dict(tfm.children())
    return {
        name: getattr(value, "__qualname__", value)
        for name, value in fields.items()
        if not (inner and isinstance(value, (Transform, tuple, list, dict)))
    }


def _numbered(groups: Any, param_groups: Any) -> list[tuple[Any, Tensor]]:
    pairs = zip(groups, param_groups, strict=True)
    return [(i, p) for a, b in pairs for i, p in zip(a["params"], b["params"], strict=True)]
