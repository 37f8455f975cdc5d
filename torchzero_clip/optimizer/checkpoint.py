"""Checkpoints: what is checked and restored on loading; saving is torch's own `state_dict`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.link import Link
from torchzero_clip.core.norms.shards import local
from torchzero_clip.core.state import share_vectors
from torchzero_clip.core.stochastic import DRAWS
from torchzero_clip.optimizer.fingerprint import fingerprint, marks, other_arguments
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer.state_checks import (
    STATISTICS,
    WIDTHS,
    Entry,
    check_kind,
    check_shared,
    check_state,
    entries,
    is_users,
    numbered,
    rows_of,
    take_counts,
    with_keys,
)


def complete(given: Any, names: GroupKeys) -> Any:
    """The state dict with "state", which distributed checkpointing drops where it is empty."""
    p = torch.empty(1, device="meta")
    bare = isinstance(given, Mapping) and not any([link.layout(p) for link in names.links])
    return {"state": {}, **given} if bare else given


def check_form(given: Any, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raise a sentence unless this is a state dict in form, with groups like these."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(
            "a checkpoint is what state_dict() gave, a dict of 'state' and 'param_groups', got "
            f"{found}"
        )
    state, groups = given["state"], given["param_groups"]
    check_kind("'state' of the checkpoint", state, Mapping, "a dict")
    check_kind("'param_groups' of the checkpoint", groups, (list, tuple), "a list")
    for g, group in enumerate(groups):
        check_kind(f"group {g} of the checkpoint", group, Mapping, "a dict")
        if odd := [key for key in group if not isinstance(key, str)]:
            raise ValueError(f"the keys of group {g} of the checkpoint must be names, got {odd}")
        check_kind(f"'params' of group {g}", group.get("params", ()), (list, tuple), "a list")
    ours = [len(group["params"]) for group in param_groups]
    theirs = [len(group.get("params", ())) for group in groups]
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has groups of {theirs} parameters, this optimizer of {ours}"
        )
    indexes = [index for group in groups for index in group.get("params", ())]
    if not all([isinstance(index, (int, str)) for index in indexes]):
        raise ValueError(f"the checkpoint must number its parameters, got {indexes}")
    if len(set(indexes)) < len(indexes):
        raise ValueError(f"the checkpoint has a parameter twice in its groups, got {indexes}")
    named = any([isinstance(index, str) for index in indexes])
    unknown = set(state) - set(indexes)
    unknown -= set() if named else {key for key in unknown if isinstance(key, str)}  # a wrapper's
    if unknown:
        raise ValueError(
            f"the checkpoint has state of {sorted(map(str, unknown))}, which are no parameters of "
            "its groups"
        )
    for index in indexes:
        check_kind(f"the state of parameter {index}", state.get(index, {}), Mapping, "a dict")


def with_live_values(
    given: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], names: GroupKeys
) -> dict[str, Any]:
    """A checkpoint with the live values that it lacks, as they are in the groups here."""
    groups = [dict(group) for group in given["param_groups"]]
    for group, here in zip(groups, param_groups, strict=True):
        known = {names.aliases.get(key, key) for key in group}
        group.update({key: here[key] for key in names.defaults if key in here and key not in known})
    return {**given, "param_groups": groups}


def without_users(given: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint without the keys of users, whose values torch would cast or take apart."""
    return with_keys(given, lambda key: not is_users(key))


def check_dtypes(
    param_groups: Sequence[dict[str, Any]], state: Mapping[Tensor, Any], names: GroupKeys
) -> None:
    """Raise a sentence where state has no longer the dtype that its parameter asks for."""
    for g, group in enumerate(param_groups):
        for i, p in enumerate(group["params"]):
            for key, entry in entries(p, names).items() if state.get(p) else ():
                held = state[p].get(key)
                own = isinstance(held, Tensor) and entry.kinds is not STATISTICS
                if own and held.dtype != entry.example.dtype:
                    raise TypeError(
                        f"parameter {i} of group {g} is {p.dtype} now, and its state {key!r} still "
                        f"{held.dtype}: convert a model before its optimizer is made, or let the "
                        "state begin anew with optimizer.state.clear()"
                    )


def check_checkpoint(
    given: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], names: GroupKeys, chain: str
) -> None:
    """Raise a sentence unless every value has its name, shape and dtype, and none became NaN."""
    groups = given["param_groups"]
    mine, rows = fingerprint(names.links), rows_of(names)
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
        try:
            names.tidy(dict(group), later=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"group {g} of the checkpoint: {error}") from None
        changed = changed or other_arguments(marks(shared), mine)
        params = param_groups[g]["params"]
        check_shared(f"group {g}", shared, params, names)
        for index, p in zip(group["params"], params, strict=True):
            if held := given["state"].get(index):
                check_state(f"parameter {index}", held, shared, p, names, rows)
    _refuse_nan(given, param_groups, names)
    if changed:
        warnings.warn(
            f"the checkpoint was saved by a chain with other fixed arguments than {chain}",
            stacklevel=5,
        )


def restore_state(
    given: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    names: GroupKeys,
) -> None:
    """Give state its own dtype back: torch casts it to the parameter's."""
    for _, p, held in numbered(given, param_groups):
        known = entries(p, names)
        for key, value in held.items():
            if is_users(key):
                state[p][key] = value if key == "step" else _moved(value, p.device)
            elif isinstance(value, Tensor):
                state[p][key] = value.to(p.device, _loaded_dtype(value, p, known.get(key)))
            elif key.rpartition("/")[2] not in known[key].link.transform.numbers:
                state[p][key] = torch.full_like(known[key].example, value, device=p.device)
    for group in param_groups:
        kinds: dict[Any, list[dict[str, Any]]] = {}
        for p in group["params"]:
            if p in state:
                kinds.setdefault((p.device, p.dtype), []).append(state[p])
        for memories in kinds.values():
            share_vectors(memories, memories[0])


def keep_draws(given: Mapping[str, Any], seen: Mapping[str, Any], links: Sequence[Link]) -> None:
    """Take over the seed and the count of steps where state is rounded here, too."""
    if any([link.narrow for link in links]):
        take_counts(given, seen, DRAWS)


def _loaded_dtype(value: Tensor, p: Tensor, entry: Entry | None) -> torch.dtype:
    """The dtype that a tensor of a checkpoint has here: state may come wider or narrower."""
    if entry is not None and value.shape == p.shape and value.dtype in WIDTHS:
        return entry.example.dtype if entry.example.dtype in WIDTHS else value.dtype
    return value.dtype


def _moved(value: Any, device: torch.device) -> Any:
    """A value under a user's key, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device=device)
    if type(value) is dict:
        return {key: _moved(inner, device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_moved(inner, device) for inner in value])
    return value


def _contents(given: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """The live values and state of another chain's checkpoint, for the sentence about it."""
    live = sorted(set(group) - RESERVED)
    rows = [given["state"].get(index, {}) for index in group["params"]] + [group["chain"]]
    held = {key.rpartition("/")[0] for row in rows for key in row if not is_users(key)}
    return f"hyperparameters {live} and state of {sorted(held)}"


def _refuse_nan(
    given: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], names: GroupKeys
) -> None:
    """Raise where a value of state became NaN; waits for each device once."""
    kept: list[tuple[str, str, Any, Tensor | None]] = [
        (f"parameter {index}", key, value, p)
        for index, p, held in numbered(given, param_groups)
        for key, value in held.items()
    ]
    for g, group in enumerate(given["param_groups"]):
        kept += [(f"group {g}", key, value, None) for key, value in group["chain"].items()]
    kept = [row for row in kept if not is_users(row[1])]
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
    """A flag a value: whether it has a NaN. Of sharded values each rank looks at its own part."""
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


def _starts_as_nan(key: str, p: Tensor | None, names: GroupKeys) -> bool:
    """Whether this state is NaN until something is known, as the places of an empty window."""
    path, _, name = key.rpartition("/")
    rule = next(link.transform for link in names.links if link.path == path)
    made = rule.per_group() if p is None else rule.per_parameter(p)
    return name in made and bool(torch.as_tensor(made[name]).isnan().any())
