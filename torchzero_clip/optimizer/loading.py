"""Loading a checkpoint, and the live values that were given beside its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.checkpoint import Checkpoint, check_form
from torchzero_clip.optimizer.keys import GroupKeys

OwnGroups: TypeAlias = Sequence[dict[str, Any]]


@contextmanager
def loading(optimizer: Any, state_dict: Any, keep: Sequence[str]) -> Iterator[None]:
    """While it lasts torch's `load_state_dict` takes a checkpoint of the optimizer's chain, or
    raises before anything changes.
    """
    checked: list[Checkpoint] = []
    if not isinstance(state_dict, Mapping):  # torch would copy it before anybody looks
        check_form(state_dict, optimizer.param_groups)

    def look(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        groups, keys = optimizer.param_groups, optimizer.keys
        checkpoint = Checkpoint(given, groups, keys, optimizer.layout)
        keep_given(checkpoint.groups, groups, keys, keep)
        checkpoint.check(repr(optimizer.chain))
        warn_of_values(checkpoint.groups, groups, keys, optimizer._scheduled)
        checkpoint.adapt()
        checked.append(checkpoint)
        return checkpoint.for_torch()

    def restore(_: Optimizer) -> None:
        checked[0].restore(optimizer.state)

    before = optimizer.register_load_state_dict_pre_hook(look)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    with before, after:
        yield


def keep_given(theirs: OwnGroups, ours: OwnGroups, keys: GroupKeys, names: Sequence[str]) -> None:
    """Put our live values of these names in the place of those of the checkpoint."""
    for name in names:
        key = keys.aliases.get(name, name)
        if key not in keys.defaults:
            raise ValueError(
                f"load_state_dict: keep takes names of live values, {[*keys.defaults]}, "
                f"got {name!r}"
            )
        spelt = {key, *[long for long, short in keys.aliases.items() if short == key]}
        spelt |= {"initial_lr"} if key == "lr" else set()  # schedulers multiply that
        for group, here in zip(theirs, ours, strict=True):
            for other in spelt & group.keys():
                del group[other]
            group.update({other: here[other] for other in spelt & here.keys()})


def warn_of_values(
    groups: OwnGroups, ours: OwnGroups, keys: GroupKeys, scheduled: Collection[str]
) -> None:
    """Warn where live values that were given differ from those that are loaded."""
    found: dict[str, str] = {}
    for g, (theirs, here) in enumerate(zip(groups, ours, strict=True)):
        keys.tidy(theirs := dict(theirs), later=True)
        for key in keys.defaults.keys() - scheduled - found.keys():
            if not _as_given(key, theirs, here):
                taken, given = _told(theirs[key]), _told(here[key])
                told = f"{key}: the checkpoint's {taken} is taken, {given} was given"
                found[key] = f"group {g}: {told}" if g else told
    names = [key for key in keys.defaults if key in found]
    if names:
        warn(
            f"{'; '.join([found[key] for key in names])}. To take what was given: "
            f"load_state_dict(state_dict, keep={tuple(names)})",
        )


def _as_given(key: str, theirs: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether a value of a checkpoint is the one that was given, or what a scheduler of torch made
    of it.
    """
    rate, cycled = key == "lr", key in ("betas", "momentum") and "max_momentum" in theirs
    given = here.get("initial_lr", here[key]) if rate else here[key]
    begun = [theirs[k] for k in ("initial_lr", "max_lr") if rate and k in theirs]
    return cycled or any([_alike(given, value) for value in (theirs[key], *begun)])


def _alike(a: Any, b: Any) -> bool:
    """Whether two live values are equal; numbers to the precision of a tensor that holds one."""
    a, b = _told(a), _told(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _told(value: Any) -> Any:
    """A live value as a number that can be read, or printed."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_told, value))
    return value.item() if isinstance(value, Tensor) and not value.is_meta else value
