"""Checkpoints: what is checked and restored on loading; saving is torch's own `state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.description import RESERVED
from torchzero_clip.core.formats import KEPT, Kahan
from torchzero_clip.core.formats.stochastic import DRAWS, DROPPED, ROUNDS
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.stacks import batches, in_order
from torchzero_clip.core.state import share_vectors
from torchzero_clip.core.step import Groups
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import norm_groups
from torchzero_clip.optimizer.fingerprint import fingerprint, marks
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer.rounding import kept_halves, split
from torchzero_clip.optimizer.state_layout import (
    ROUNDING,
    STATISTICS,
    Entry,
    StateLayout,
    check_count,
    is_links,
)


class Checkpoint:
    """A state dict that an optimizer with these groups is to load; raises unless it is one in form.

    Args:
        given: The state dict.
        param_groups: The groups of the optimizer.
        keys: The keys of its live values. Those that the checkpoint lacks stay as they are here.
        layout: What the optimizer keeps.
    """

    def __init__(
        self, given: Any, param_groups: Groups, keys: GroupKeys, layout: StateLayout
    ) -> None:
        bare = not layout.of_parameter(torch.empty(1, device="meta"))
        if isinstance(given, Mapping) and bare:  # distributed checkpointing drops what is empty
            given = {"state": {}, **given}
        check_form(given, param_groups)
        self.given, self.param_groups, self.keys, self.layout = given, param_groups, keys, layout
        self.state = {index: kept_halves(held) for index, held in given["state"].items()}
        self.groups = list(map(norm_groups.kept, given["param_groups"], param_groups))
        for group, here in zip(self.groups, param_groups, strict=True):
            known = {keys.aliases.get(key, key) for key in group}
            left = [key for key in keys.defaults if key in here and key not in known]
            group.update({key: here[key] for key in left})

    def rows(self) -> Iterator[tuple[Any, Tensor, Mapping[str, Any]]]:
        """Every parameter with its index in the checkpoint, and what that holds for it."""
        for theirs, ours in zip(self.groups, self.param_groups, strict=True):
            for index, p in zip(theirs["params"], ours["params"], strict=True):
                yield index, p, self.state.get(index, {})

    def check(self, chain: str) -> None:
        """Raise a sentence unless all values have their name, shape and dtype, and none is NaN."""
        mine = fingerprint(self.keys.links)
        for g, group in enumerate(self.groups):
            shared = group.get("chain")
            if not isinstance(shared, dict):
                raise ValueError(
                    f"group {g} of the checkpoint has no 'chain': it was saved by another kind of "
                    'optimizer; take_over(optimizer, state_dict, link="Adam") takes the state that '
                    "the link of this name can go on with"
                )
            if marks(shared)[:1] != mine[:1]:
                raise ValueError(
                    f"the checkpoint was saved by another chain, with {self._contents(group)}; "
                    f"this one is {chain}; take_over(optimizer, state_dict) takes what both have"
                )
            try:
                self.keys.tidy(dict(group), later=True)
            except (TypeError, ValueError) as error:
                raise ValueError(f"group {g} of the checkpoint: {error}") from None
            params = self.param_groups[g]["params"]
            _check_order(g, group.get("param_names"), self.param_groups[g].get("param_names"))
            self.layout.check_group(f"group {g}", shared, params)
            clips = self.param_groups[g].get("clip", True)
            names = self.param_groups[g].get("param_names", [None] * len(params))
            for index, p, name in zip(group["params"], params, names, strict=True):
                if held := self.state.get(index):
                    where = f"parameter {index}"
                    self.layout.check_parameter(where, held, shared, p, clips, name)
        self._refuse_nan()
        if any([marks(group["chain"]) != mine for group in self.groups]):
            warn(
                f"the checkpoint was saved by a chain with other fixed arguments than {chain}, "
                "which goes on with its own: make the chain as it was if that is not meant",
            )

    def adapt(self) -> None:
        """Keep of roundings what is needed here; warn where parameters were saved with another."""
        rounding, rows = self.layout.rounding, list(self.rows())
        counts = [*ROUNDS] if rounding == "stochastic" else []
        counts += DRAWS if any([link.narrow for link in self.keys.links]) else ()
        half = [held for _, p, held in rows if p.dtype in DROPPED]
        here = rounding if half else "nearest"
        drawn = any([ROUNDS[1] in group["chain"] for group in self.groups])
        known = ["nearest" if any(half) else here]
        known += ["stochastic"] * drawn
        known += [name for name, x in KEPT.items() if any([x.key in held for _, _, held in rows])]
        saved = known[-1]
        for group in self.groups:
            chain = group["chain"].items()
            group["chain"] = {k: x for k, x in chain if k in counts or k not in ROUNDING}
            for key in [key for key in counts if key in group["chain"]]:
                check_count("a group", key, group["chain"][key])
        self.splits = (saved, here) == ("kahan", "exact")
        if saved != here:
            end = KEPT[saved].ends if saved in KEPT else KEPT[here].begins if here in KEPT else ""
            end = "its compensation goes into the lower halves" if self.splits else end
            warn(
                f"the checkpoint was saved with rounding={saved!r}, the parameters here have "
                f"rounding={here!r}" + (f": {end}" if end else ""),
            )

    def for_torch(self) -> dict[str, Any]:
        """What torch loads: no state of parameters, which it would cast to their dtype."""
        mine = {index for index, _, _ in self.rows()}
        rest = {key: held for key, held in self.state.items() if key not in mine}  # a wrapper's
        return {**self.given, "state": rest, "param_groups": self.groups}

    def restore(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Put the state of parameters where torch has loaded the rest."""
        alike: dict[Any, list[dict[str, Any]]] = {}  # those of units lie together over all groups
        group_of = {p: g for g, group in enumerate(self.param_groups) for p in group["params"]}
        for index, p, held in self.rows():
            if index in self.state:
                known = self.layout.of_parameter(p)
                rows = [(key, value, known.get(key)) for key, value in held.items()]
                rows = [row for row in rows if row[2] is not None or row[0] not in ROUNDING]
                state[p] = {key: _loaded(key, value, p, entry) for key, value, entry in rows}
                if self.splits and Kahan.key in held:
                    lost = local(held[Kahan.key]).to(p.device)
                    split(p, local(p).detach().float().add(lost), state[p])
                for key, _, entry in rows:
                    where = () if entry and entry.kinds is STATISTICS else (p.dtype, group_of[p])
                    alike.setdefault((key, p.device, *where), []).append(state[p])
        for (key, *_), memories in alike.items():
            share_vectors(memories, [key])

    def _contents(self, group: Mapping[str, Any]) -> str:
        """The live values and state of another chain's checkpoint, for the sentence about it."""
        live = sorted(set(group) - RESERVED)
        rows = [self.state.get(index, {}) for index in group["params"]] + [group["chain"]]
        held = {key.rpartition("/")[0] for row in rows for key in row if is_links(key)}
        return f"hyperparameters {live} and state of {sorted(held)}"

    def _refuse_nan(self) -> None:
        """Raise where a value of state became NaN; waits for each device once."""
        kept: list[tuple[str, str, Any, Tensor | None]] = [
            (f"parameter {index}", key, value, p)
            for index, p, held in self.rows()
            for key, value in held.items()
        ]
        for g, group in enumerate(self.groups):
            kept += [(f"group {g}", key, value, None) for key, value in group["chain"].items()]
        kept = [row for row in kept if is_links(row[1])]
        nans = _are_nan([value for _, _, value, _ in kept])
        broken = [
            f"{key!r} of {where}"
            for (where, key, _, p), nan in zip(kept, nans, strict=True)
            if nan and not self.layout.starts_as_nan(key, p)
        ]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise ValueError(
                f"the checkpoint has NaN in {broken[0]}{more}: a run that goes on from it gives "
                "NaN, so load an earlier one; to load it all the same, put numbers in their place "
                "first, for example with torch.nan_to_num_"
            )


def check_form(given: Any, param_groups: Groups) -> None:
    """Raise a sentence unless this is a state dict in form, with groups like these."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        found = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(
            "a checkpoint is what state_dict() gave, a dict of 'state' and 'param_groups', got "
            f"{found}"
        )
    state, groups = given["state"], given["param_groups"]
    _check_kind("'state' of the checkpoint", state, Mapping, "a dict")
    _check_kind("'param_groups' of the checkpoint", groups, (list, tuple), "a list")
    for g, group in enumerate(groups):
        _check_kind(f"group {g} of the checkpoint", group, Mapping, "a dict")
        if odd := [key for key in group if not isinstance(key, str)]:
            raise ValueError(f"the keys of group {g} of the checkpoint must be names, got {odd}")
        _check_kind(f"'params' of group {g}", group.get("params", ()), (list, tuple), "a list")
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
        _check_kind(f"the state of parameter {index}", state.get(index, {}), Mapping, "a dict")


def _check_order(g: int, saved: Any, here: Any) -> None:
    """Raise a sentence where parameters have the names of the checkpoint in another order."""
    if saved and here and list(saved) != list(here) and sorted(saved) == sorted(here):
        i = next(i for i, pair in enumerate(zip(saved, here, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"group {g} of the checkpoint has {saved[i]!r} as parameter {i}, here it is "
            f"{here[i]!r}: state goes by place, so give the parameters in the order in which they "
            "were saved"
        )


def _check_kind(what: str, value: Any, kind: Any, words: str) -> None:
    """Raise a sentence unless a value is of a kind, which `words` name."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} must be {words}, got {type(value).__name__}")


def _loaded(key: str, value: Any, p: Tensor, entry: Entry | None) -> Any:
    """A value of a checkpoint as it is kept here: on the device, and in the dtype of its kind."""
    if entry is None:  # a user's
        return value if key == "step" else _moved(value, p.device)
    if isinstance(value, Tensor):
        return value.to(p.device, value.dtype if entry.kinds is STATISTICS else entry.example.dtype)
    return value if entry.is_number(key) else torch.full_like(entry.example, value, device=p.device)


def _moved(value: Any, device: torch.device) -> Any:
    """A value under a user's key, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device=device)
    if type(value) is dict:
        return {key: _moved(inner, device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_moved(inner, device) for inner in value])
    return value


def _are_nan(values: Sequence[Any]) -> list[bool]:
    """A flag a value: whether it has a NaN. Of sharded values each rank looks at its own part."""

    def are_nan(some: list[int]) -> list[bool]:
        if places[some[0]] is None:
            return [isinstance(values[i], float) and values[i] != values[i] for i in some]
        return list(torch.stack([local(values[i]).isnan().any() for i in some]).tolist())

    places = [x.device if isinstance(x, Tensor) and not x.is_meta else None for x in values]
    return in_order(batches(places), are_nan)
