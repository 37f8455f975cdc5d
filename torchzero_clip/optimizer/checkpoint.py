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
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.norms.shards import local
from torchzero_clip.core.tensors import join
from torchzero_clip.core.transform import Link, Transform
from torchzero_clip.optimizer.keys import Names

MARK = "fingerprint"
STATISTICS = {torch.float32, torch.float64}  # numbers are as wide as a unit's widest parameter


def fingerprint(links: Sequence[Link]) -> list[int]:
    """Numbers that tell two chains apart: of their links, and of their fixed arguments."""
    names = [f"{link.path}:{type(link.transform).__name__}" for link in links]
    fixed = [f"{k}={v!r}" for link in links for k, v in sorted(_fixed(link.transform).items())]
    return [zlib.crc32("\n".join(lines).encode()) for lines in (names, fixed)]


def shared_start(links: Sequence[Link], params: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """The chain dict of a new group: the fingerprint, and what a group of the same chain had.

    The fingerprint is a tensor with a dimension, since distributed checkpointing takes from such
    the device to load to, and there may be no other.
    """
    mine = fingerprint(links)
    kept = held if marks(held)[:1] == mine[:1] else {}
    device = next(iter(params)).device
    device = "cpu" if device.type == "meta" else device
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
    return {**copied, MARK: torch.tensor(mine, device=device)}


def marks(shared: Mapping[str, Any]) -> list[int]:
    """The fingerprint in a chain dict, or nothing."""
    held = shared.get(MARK)
    return held.tolist() if isinstance(held, Tensor) and held.dim() == 1 else []


def complete(given: Any, names: Names) -> Any:
    """Distributed checkpointing drops "state" where no parameter has any."""
    kept = isinstance(given, Mapping) and not any([link.stateful for link in names.links])
    return {"state": {}, **given} if kept else given


def check_checkpoint(
    given: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], names: Names, chain: str
) -> None:
    """Raise a sentence unless every value has its name, shape and dtype, and none became NaN."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(
            "a checkpoint is what state_dict() gave, a dict of 'state' and 'param_groups', got "
            f"{found}"
        )
    groups = given["param_groups"]
    ours = [len(group["params"]) for group in param_groups]
    theirs = [len(group.get("params", ())) for group in groups]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has groups of {theirs} parameters, this optimizer of {ours}"
        )
    numbered = _numbered(groups, param_groups)
    if unknown := set(given["state"]) - {index for index, _ in numbered}:
        raise ValueError(
            f"the checkpoint has state of {sorted(map(str, unknown))}, which are no parameters of "
            "its groups"
        )
    mine, rows = fingerprint(names.links), _rows(names)
    changed = False
    for g, group in enumerate(groups):
        shared = group.get("chain")
        if not isinstance(shared, dict):
            raise ValueError(
                f"group {g} of the checkpoint has no 'chain': it was saved by another kind of "
                "optimizer, whose state this chain cannot read"
            )
        if marks(shared)[:1] != mine[:1]:
            raise ValueError(
                f"the checkpoint was saved by another chain, with {_contents(given, group)}; this "
                f"one is {chain}"
            )
        if missing := set(names.defaults) - set(group):
            raise ValueError(f"group {g} of the checkpoint lacks {sorted(missing)}")
        try:
            names.tidy(dict(group), later=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"group {g} of the checkpoint: {error}") from None
        changed = changed or marks(shared) != mine
        params = param_groups[g]["params"]
        _check_shared(f"group {g}", shared, params, names)
        for index, p in zip(group["params"], params, strict=True):
            if held := given["state"].get(index):
                _check_state(f"parameter {index}", held, shared, p, names, rows)
    _refuse_nan(given, numbered, names)
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
    plain = {
        f"{link.path}/{name}"
        for link in names.links
        for name in getattr(link.transform, "numbers", ())
    }
    for index, p in _numbered(given["param_groups"], param_groups):
        for key, value in given["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                state[p][key] = value.to(device=p.device)
            elif key not in plain:
                layouts = [link.layout(p) for link in names.links]
                example = next(row[key] for row in layouts if key in row)
                state[p][key] = torch.full_like(example, value, device=p.device)
    for group in param_groups:
        kinds: dict[Any, list[dict[str, Any]]] = {}
        for p in group["params"]:
            if p in state:
                kinds.setdefault((p.device, p.dtype), []).append(state[p])
        for memories in kinds.values():
            join(memories, memories[0])


def _contents(given: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """What a checkpoint of another chain holds, to tell which it was."""
    live = sorted(set(group) - RESERVED)
    held = {key.rpartition("/")[0] for held in given["state"].values() for key in held}
    held |= {key.rpartition("/")[0] for key in group["chain"] if "/" in key}
    return f"hyperparameters {live} and state of {sorted(held)}"


def _check_state(
    where: str,
    held: Mapping[str, Any],
    shared: Mapping[str, Any],
    p: Tensor,
    names: Names,
    rows: Sequence[Sequence[Link]],
) -> None:
    """What is kept for one parameter."""
    layouts = {link.path: link.layout(p) for link in names.links}
    for row in rows:
        expected = {key for link in row for key in layouts[link.path]}
        common = {f"{link.path}/{name}" for link in row for name in link.shared_values()}
        missing = sorted((expected - held.keys()) | (common - shared.keys()))
        if missing and not expected.isdisjoint(held):
            raise ValueError(f"the checkpoint lacks {', '.join(map(repr, missing))} of {where}")
    left = set(held)
    for link in names.links:
        numbers = list(getattr(link.transform, "init_unit", dict)())
        for key in left & layouts[link.path].keys():
            own = key.rpartition("/")[2] not in numbers
            _check_value(where, key, held[key], layouts[link.path][key], dtype=own)
        left -= layouts[link.path].keys()
    if left:
        raise ValueError(f"the checkpoint has {sorted(left)} for {where}, which no link makes")


def _check_shared(
    where: str, shared: Mapping[str, Any], params: Sequence[Tensor], names: Names
) -> None:
    """The part that is kept once for a group: numbers, and what rules of that scope make."""
    left = set(shared) - {MARK}
    for link in names.links:
        own = {k for k in left if k.rpartition("/")[0] == link.path}
        made = {f"{link.path}/{name}": value for name, value in link.shared_values().items()}
        for key, value in made.items():
            if own and params and key not in own:
                raise ValueError(f"the checkpoint lacks {key!r} of {where}")
            if own and params:
                _check_value(where, key, shared[key], statistic(value, params[0]), dtype=False)
        left -= made.keys() if _is_plain(link) else own
    if left:
        raise ValueError(f"the checkpoint has {sorted(left)} for {where}, which no link makes")


def _check_value(where: str, key: str, value: Any, example: Tensor, dtype: bool = True) -> None:
    here = f"{key!r} of {where}"
    if not isinstance(value, Tensor):
        if example.dim() or not isinstance(value, (int, float)):
            raise ValueError(
                f"the checkpoint has {value!r} where {here} is a tensor of shape "
                f"{tuple(example.shape)}"
            )
    elif value.shape != example.shape:
        raise ValueError(
            f"the checkpoint has shape {tuple(value.shape)} for {here}, here it is "
            f"{tuple(example.shape)}"
        )
    elif value.dtype != example.dtype and (dtype or {value.dtype, example.dtype} != STATISTICS):
        raise ValueError(
            f"the checkpoint has dtype {value.dtype} for {here}, here it is {example.dtype}"
        )


def _rows(names: Names) -> list[list[Link]]:
    """Links of which a parameter has the state of all or of none.

    Those are one link, and plain links of the chain that follow each other.
    """
    tops = [link for link in names.links if "/" not in link.path]
    rows = [[link] for link in names.links if link not in tops]
    for before, link in zip([None, *tops], tops, strict=False):
        if before is not None and _is_plain(before) and _is_plain(link):
            rows[-1].append(link)
        else:
            rows.append([link])
    return rows


def _is_plain(link: Link) -> bool:
    """Whether the link has no step of its own, so that it acts in every step and ends none."""
    return getattr(type(link.transform), "step", None) in (Transform.step, NormRule.step)


def _refuse_nan(given: Mapping[str, Any], pairs: list[tuple[Any, Tensor]], names: Names) -> None:
    """Raise if something became NaN; looks at each device once."""
    kept: list[tuple[str, str, Any, Tensor | None]] = [
        (f"parameter {index}", key, value, p)
        for index, p in pairs
        for key, value in given["state"].get(index, {}).items()
    ]
    for g, group in enumerate(given["param_groups"]):
        kept += [(f"group {g}", key, value, None) for key, value in group["chain"].items()]
    broken = [
        f"{key!r} of {where}"
        for (where, key, _, p), nan in zip(kept, _are_nan([row[2] for row in kept]), strict=True)
        if nan and not _starts_as_nan(key, p, names)
    ]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise ValueError(
            f"the checkpoint has NaN in {broken[0]}{more}: a run that goes on from it gives NaN, "
            "so load an earlier one; to load it all the same, put numbers in their place first, "
            "for example with torch.nan_to_num_"
        )


def _are_nan(values: Sequence[Any]) -> list[bool]:
    """Which values have a NaN; of sharded ones each rank looks at its own part."""
    found = [isinstance(value, float) and value != value for value in values]
    places: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and not value.is_meta:
            places.setdefault(value.device, []).append(i)
    for where in places.values():
        flags = torch.stack([local(values[i]).isnan().any() for i in where])
        for i, flag in zip(where, flags.tolist(), strict=True):
            found[i] = flag
    return found


def _starts_as_nan(key: str, p: Tensor | None, names: Names) -> bool:
    """Whether this state is NaN until something is known, as the places of an empty window."""
    path, _, name = key.rpartition("/")
    rule = next(link.transform for link in names.links if link.path == path)
    made = rule.per_group() if p is None else rule.per_parameter(p)
    return name in made and bool(torch.as_tensor(made[name]).isnan().any())


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
