"""Checkpoints: checks during loading, and restoring state. torch's `state_dict` saves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.description import ON_NORMS, RESERVED
from torchzero_clip.core.formats import KEPT, Kahan
from torchzero_clip.core.formats.stochastic import DRAWS, DROPPED, ROUNDS
from torchzero_clip.core.sharding.layout import in_shards, layout_of, local
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.state import share_vectors
from torchzero_clip.core.step import Groups
from torchzero_clip.core.torch_private import tree_map_only
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import norm_groups
from torchzero_clip.optimizer.fingerprint import fingerprint, marks
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer.rounding import halves_as_integers, split
from torchzero_clip.optimizer.state_layout import (
    ROUNDING,
    STATISTICS,
    Entry,
    StateLayout,
    check_count,
    is_links,
)


class Checkpoint:
    """A state dict that an optimizer will load. A dict in another form raises an error.

    Args:
        state_dict: The state dict.
        param_groups: The groups of the optimizer.
        keys: The keys of the optimizer's hyperparameters. If the checkpoint lacks a key, the
            optimizer keeps its value.
        layout: The state that the optimizer keeps.
    """

    def __init__(
        self, state_dict: Any, param_groups: Groups, keys: GroupKeys, layout: StateLayout
    ) -> None:
        without_state = not layout.of_parameter(torch.empty(1, device="meta"))
        if isinstance(state_dict, Mapping) and without_state:
            state_dict = {"state": {}, **state_dict}  # distributed checkpointing drops empty dicts
        check_form(state_dict, param_groups)
        self.state_dict = state_dict
        self.param_groups = param_groups
        self.keys = keys
        self.layout = layout
        self.state = {
            i: halves_as_integers(of_param) for i, of_param in state_dict["state"].items()
        }
        self.groups: list[dict[str, Any]] = []
        for theirs, here in zip(state_dict["param_groups"], param_groups, strict=True):
            group = norm_groups.with_own_settings(theirs, here)
            known = {keys.aliases.get(key, key) for key in group}
            missing = [key for key in keys.defaults if key in here and key not in known]
            group.update({key: here[key] for key in missing})
            self.groups.append(group)

    def params(self) -> Iterator[tuple[Any, Tensor, Mapping[str, Any]]]:
        """Yield every parameter, with the parameter's index and state in the checkpoint."""
        for theirs, ours in zip(self.groups, self.param_groups, strict=True):
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                yield index, p, self.state.get(index, {})

    def check(self, chain: str) -> None:
        """Raise an error if a value has a wrong name, shape or dtype, or is NaN."""
        own_marks = fingerprint(self.keys.links)
        for g, group in enumerate(self.groups):
            shared = group.get("chain")
            if not isinstance(shared, dict):
                raise ValueError(
                    f"group {g} of the checkpoint has no key 'chain', so the checkpoint was not "
                    "saved by torchzero_clip. To load the state of torch.optim.Adam or AdamW into "
                    'the transform Adam, call take_over(optimizer, state_dict, link="Adam")'
                )
            if marks(shared)[:1] != own_marks[:1]:
                raise ValueError(
                    "the checkpoint was saved with different transforms. The checkpoint has "
                    f"{self._contents(g)}, but this optimizer has {chain}: to load the "
                    "state of the transforms that both have, call take_over(optimizer, "
                    "state_dict)"
                )
            try:
                self.keys.tidy(dict(group), later=True)
            except (TypeError, ValueError) as error:
                raise ValueError(f"group {g} of the checkpoint: {error}") from None
            self._check_state(g, group, shared)
        self._refuse_nan()
        if any([marks(group["chain"]) != own_marks for group in self.groups]):
            warn(
                "the checkpoint was saved with different arguments of the transforms. The "
                f"optimizer ignores the arguments in the checkpoint and uses {chain}",
            )

    def _check_state(self, g: int, group: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Raise an error unless a group and its parameters have the state that the links keep."""
        here = self.param_groups[g]
        params = here["params"]
        check_order(g, self.state_dict["param_groups"], self.param_groups)
        self.layout.check_group(f"group {g}", shared, params)
        clips = here.get("clip", True)
        names = here.get("param_names", [None] * len(params))
        for index, p, name in zip(group["params"], params, names, strict=True):
            if of_param := self.state.get(index):
                where = f"parameter {index}"
                self.layout.check_parameter(where, of_param, shared, p, clips, name)

    def adapt(self) -> None:
        """Drop the state of roundings that are not in use, and warn if the roundings differ."""
        rounding = self.layout.rounding
        states = [of_param for _, _, of_param in self.params()]
        states += [group["chain"] for group in self.groups]
        saved_keys = set[Any]().union(*states)
        counts = [*ROUNDS] if rounding == "stochastic" else []
        if any([link.narrow for link in self.keys.links]):
            counts += DRAWS
        in_half_precision = [of_param for _, p, of_param in self.params() if p.dtype in DROPPED]
        here = rounding if in_half_precision else "nearest"
        saved = "nearest" if any(in_half_precision) else here
        if ROUNDS[1] in saved_keys:
            saved = "stochastic"
        for name, kept_form in KEPT.items():
            if kept_form.key in saved_keys:
                saved = name
        for group in self.groups:
            items = group["chain"].items()
            group["chain"] = {k: x for k, x in items if k in counts or k not in ROUNDING}
            for key in [key for key in counts if key in group["chain"]]:
                check_count("a group", key, group["chain"][key])
        self.splits = (saved, here) == ("kahan", "exact")
        if saved != here:
            effect = ""
            if self.splits:
                effect = ": the compensation of 'kahan' is added to the float32 weights"
            elif saved in KEPT:
                effect = f": {KEPT[saved].ends}"
            elif here in KEPT:
                effect = f": {KEPT[here].begins}"
            warn(
                f"the checkpoint was saved with rounding={saved!r}, but this optimizer uses "
                f"rounding={here!r}{effect}",
            )

    def for_torch(self) -> dict[str, Any]:
        """Return the part that torch loads. It has no state of parameters. torch would cast it."""
        own = {index for index, _, _ in self.params()}
        rest = {key: value for key, value in self.state.items() if key not in own}  # of a wrapper
        return {**self.state_dict, "state": rest, "param_groups": self.groups}

    def restore(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Put the state of parameters into the optimizer, after torch has loaded the rest."""
        # statistics of units share one vector over all groups, other numbers one per group
        sharing: dict[Any, list[dict[str, Any]]] = {}
        group_of = {p: g for g, group in enumerate(self.param_groups) for p in group["params"]}
        for index, p, of_param in self.params():
            if index not in self.state:
                continue
            known = self.layout.of_parameter(p)
            kept = [key for key in of_param if key in known or key not in ROUNDING]
            state[p] = {key: _loaded(key, of_param[key], p, known.get(key)) for key in kept}
            if self.splits and Kahan.key in of_param:
                lost = local(in_shards(of_param[Kahan.key], layout_of(p))).to(p.device)
                split(p, local(p).detach().float().add(lost), state[p])
            for key in kept:
                is_statistic = key in known and known[key].kinds is STATISTICS
                where = () if is_statistic else (p.dtype, group_of[p])
                sharing.setdefault((key, p.device, *where), []).append(state[p])
        for (key, *_), states in sharing.items():
            share_vectors(states, [key])

    def _contents(self, g: int) -> str:
        """Return an error text about hyperparameters and state in another chain's checkpoint."""
        group = self.groups[g]
        saved = self.state_dict["param_groups"][g]
        live = sorted(set(saved) - RESERVED - set(ON_NORMS))
        states = [self.state.get(index, {}) for index in group["params"]] + [group["chain"]]
        paths = {key.rpartition("/")[0] for state in states for key in state if is_links(key)}
        state = f"state of {sorted(paths)}" if paths else "no state"
        return f"the hyperparameters {live} and {state}"

    def _refuse_nan(self) -> None:
        """Raise an error if state is NaN. This synchronizes with each device once."""
        values: list[tuple[str, str, Any, Tensor | None]] = [
            (f"parameter {index}", key, value, p)
            for index, p, of_param in self.params()
            for key, value in of_param.items()
        ]
        for g, group in enumerate(self.groups):
            values += [(f"group {g}", key, value, None) for key, value in group["chain"].items()]
        values = [row for row in values if is_links(row[1])]
        nans = _are_nan([value for _, _, value, _ in values])
        broken = [
            f"{key!r} of {where}"
            for (where, key, _, p), nan in zip(values, nans, strict=True)
            if nan and not self.layout.starts_as_nan(key, p)
        ]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise ValueError(
                f"the checkpoint has NaN in {broken[0]}{more}: load an earlier checkpoint, or "
                "replace NaN in this checkpoint, for example with torch.nan_to_num_"
            )


def check_form(state_dict: Any, param_groups: Groups) -> None:
    """Raise an error unless the argument is a state dict whose groups match the given groups."""
    is_mapping = isinstance(state_dict, Mapping)
    if not is_mapping or not {"state", "param_groups"} <= state_dict.keys():
        got = sorted(map(str, state_dict)) if is_mapping else type(state_dict).__name__
        raise ValueError(
            "a checkpoint must be the result of state_dict(), a dict with the keys 'state' and "
            f"'param_groups', got {got}"
        )
    state = state_dict["state"]
    groups = state_dict["param_groups"]
    _check_kind("'state' of the checkpoint", state, Mapping, "a dict")
    _check_kind("'param_groups' of the checkpoint", groups, (list, tuple), "a list")
    for g, group in enumerate(groups):
        _check_kind(f"group {g} of the checkpoint", group, Mapping, "a dict")
        if odd := [key for key in group if not isinstance(key, str)]:
            raise ValueError(f"the keys of group {g} of the checkpoint must be strings, got {odd}")
        _check_kind(f"'params' of group {g}", group.get("params", ()), (list, tuple), "a list")
    params = [group.get("params", ()) for group in groups]
    ours = [len(group["params"]) for group in param_groups]
    theirs = list(map(len, params))
    if ours != theirs:
        raise ValueError(
            f"the checkpoint has parameter groups of sizes {theirs}, but this optimizer has groups "
            f"of sizes {ours}"
        )
    indexes = [index for of_group in params for index in of_group]
    if not all([isinstance(index, (int, str)) for index in indexes]):
        raise ValueError(
            f"'params' in the checkpoint must be lists of integers or names, got {indexes}"
        )
    if len(set(indexes)) < len(indexes):
        raise ValueError(f"the checkpoint lists a parameter twice in its groups, got {indexes}")
    named = any([isinstance(index, str) for index in indexes])
    unknown = set(state) - set(indexes)
    if not named:
        # a wrapper may have names, but "0" is an index that JSON has made a string
        unknown = {key for key in unknown if not isinstance(key, str) or key.isdigit()}
    if unknown:
        raise ValueError(
            f"the checkpoint has state for the parameters {sorted(map(str, unknown))}, but these "
            "parameters are in none of its groups"
        )
    for index in indexes:
        _check_kind(f"the state of parameter {index}", state.get(index, {}), Mapping, "a dict")


def check_order(g: int, saved_groups: Groups, groups: Groups) -> None:
    """Raise an error if a group has the names of the checkpoint at other positions.

    Groups with other names are accepted, because a wrapper may rename parameters.
    """
    saved = saved_groups[g].get("param_names") or []
    here = groups[g].get("param_names") or []
    if saved_groups[g]["params"] == here:  # set_optimizer_state_dict has matched the names
        return
    same_in_all_groups = sorted(_all_names(saved_groups)) == sorted(_all_names(groups))
    if sorted(saved) != sorted(here) and not same_in_all_groups:
        return
    for i, (saved_name, name) in enumerate(zip(saved, here, strict=False)):
        if saved_name != name:
            raise ValueError(
                f"parameter {i} of group {g} is {saved_name!r} in the checkpoint, but {name!r} in "
                "this optimizer: pass the parameters in the same order and in the same groups as "
                "when the checkpoint was saved"
            )


def _all_names(groups: Groups) -> list[str]:
    """Return the names of the parameters of all groups."""
    return [name for group in groups for name in group.get("param_names") or ()]


def _check_kind(label: str, value: Any, kind: Any, words: str) -> None:
    """Raise an error unless a value has a type. The error message calls the type `words`."""
    if not isinstance(value, kind):
        raise ValueError(f"{label} must be {words}, got {type(value).__name__}")


def _loaded(key: str, value: Any, p: Tensor, entry: Entry | None) -> Any:
    """Return a value of a checkpoint on the device and in the dtype of this optimizer."""
    if entry is None:  # the key is a user's
        if key == "step":
            return value
        return tree_map_only(Tensor, lambda t: t.to(p.device), value)
    if isinstance(value, Tensor):
        t = in_shards(value, layout_of(entry.example))
        return t.to(p.device, t.dtype if entry.kinds is STATISTICS else entry.example.dtype)
    return value if entry.is_number(key) else torch.full_like(entry.example, value, device=p.device)


def _are_nan(values: Sequence[Any]) -> list[bool]:
    """Return whether each value contains NaN. A rank checks only its parts of sharded values."""

    def are_nan(batch: list[int]) -> list[bool]:
        if devices[batch[0]] is None:
            return [isinstance(values[i], float) and values[i] != values[i] for i in batch]
        return list(torch.stack([local(values[i]).isnan().any() for i in batch]).tolist())

    devices = [x.device if isinstance(x, Tensor) and not x.is_meta else None for x in values]
    return in_order(batches(devices), are_nan)
