"""Loading of a checkpoint, with a choice of hyperparameters that keep their values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Let torch's `load_state_dict` load a checkpoint of the optimizer's chain in this context.

    A checkpoint that does not fit raises an error before anything changes.
    """
    checked: list[Checkpoint] = []
    if not isinstance(state_dict, Mapping):  # torch would copy it before any hook can check it
        check_form(state_dict, optimizer.param_groups)

    def check(_: Optimizer, own_copy: dict[str, Any]) -> dict[str, Any]:
        checkpoint = checked_checkpoint(optimizer, own_copy, keep)
        groups = optimizer.param_groups
        warn_of_values(checkpoint.groups, groups, optimizer.keys, optimizer._scheduled)
        checkpoint.adapt()
        checked.append(checkpoint)
        return checkpoint.for_torch()

    def restore(_: Optimizer) -> None:
        checked[0].restore(optimizer.state)

    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    with before, after:
        yield


def names_to_keep(keep: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in the argument `keep`, which may be a single name."""
    if not isinstance(keep, Iterable):
        raise TypeError(
            "load_state_dict: keep= must be a name or a sequence of names, such as ('lr',), got "
            f"{keep!r}"
        )
    return (keep,) if isinstance(keep, str) else tuple(keep)


def checked_checkpoint(optimizer: Any, state_dict: Any, keep: Sequence[str]) -> Checkpoint:
    """Return a checkpoint of the optimizer's chain. Raise an error if it does not fit."""
    groups = optimizer.param_groups
    checkpoint = Checkpoint(state_dict, groups, optimizer.keys, optimizer.layout)
    keep_own_values(checkpoint.groups, groups, optimizer.keys, keep)
    checkpoint.check(repr(optimizer.chain))
    return checkpoint


def keep_own_values(
    theirs: OwnGroups, ours: OwnGroups, keys: GroupKeys, names: Sequence[str]
) -> None:
    """Replace the checkpoint's values of some hyperparameters with our values.

    Args:
        theirs: The groups of the checkpoint. The function changes them.
        ours: The groups of the optimizer.
        keys: The keys of the optimizer's hyperparameters.
        names: The names of the hyperparameters that keep our values.
    """
    for name in names:
        key = keys.aliases.get(name, name)
        if key not in keys.defaults:
            raise ValueError(
                "load_state_dict: keep= must contain only hyperparameters, which are "
                f"{[*keys.defaults]}, got {name!r}"
            )
        spellings = {key, *[long for long, short in keys.aliases.items() if short == key]}
        if key == "lr":
            spellings.add("initial_lr")  # schedulers compute the rate from it
        for group, here in zip(theirs, ours, strict=True):
            for spelling in spellings & group.keys():
                del group[spelling]
            group.update({spelling: here[spelling] for spelling in spellings & here.keys()})


def warn_of_values(
    theirs: OwnGroups, ours: OwnGroups, keys: GroupKeys, scheduled: Collection[str]
) -> None:
    """Warn if hyperparameters of the checkpoint differ from the values in this optimizer.

    Args:
        theirs: The groups of the checkpoint.
        ours: The groups of the optimizer.
        keys: The keys of its hyperparameters.
        scheduled: The keys whose values a schedule changes. The function ignores them.
    """
    loaded_groups = [dict(group) for group in theirs]
    for group in loaded_groups:
        keys.tidy(group, later=True)
    changes: dict[str, str] = {}
    for key in [key for key in keys.defaults if key not in scheduled]:
        for g, (loaded, here) in enumerate(zip(loaded_groups, ours, strict=True)):
            if not _is_same_setting(key, loaded, here):
                new = _readable(loaded[key])
                old = _readable(here[key])
                change = f"{key}: {new} from the checkpoint replaces {old}"
                changes[key] = f"group {g}: {change}" if g else change
                break
    if changes:
        warn(
            f"{'; '.join(changes.values())}. To keep the values of this optimizer, "
            f"call load_state_dict(state_dict, keep={tuple(changes)})",
        )


def _is_same_setting(key: str, theirs: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's value is our value, or our value after a torch scheduler."""
    if key in ("betas", "momentum") and "max_momentum" in theirs:
        return True  # OneCycleLR and CyclicLR change the momentum
    if key != "lr":
        return _is_equal(here[key], theirs[key])
    first_rates = [theirs[k] for k in ("initial_lr", "max_lr") if k in theirs]
    own = here.get("initial_lr", here[key])
    return any([_is_equal(own, rate) for rate in (theirs[key], *first_rates)])


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two hyperparameters are equal, up to the precision of float32."""
    a = _readable(a)
    b = _readable(b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _readable(value: Any) -> Any:
    """Return a hyperparameter with numbers in place of tensors, for comparison and messages."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_readable, value))
    return value.item() if isinstance(value, Tensor) and not value.is_meta else value
