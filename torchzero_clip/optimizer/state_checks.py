"""The layout of a checkpoint: what links keep for a parameter and a group, and checks of that."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.state import statistic
from torchzero_clip.core.transform import Transform
from torchzero_clip.optimizer.keys import GroupKeys

COUNTS = frozenset({"step", "count", "seen", "skipped", "consecutive", "begun"})
"""Names of whole numbers in the state of our own links."""
WIDTHS = {torch.float32, torch.bfloat16}  # state in the shape of a parameter is in either
STATISTICS = {torch.float32, torch.float64}  # numbers are as wide as a unit's widest parameter


class Entry(NamedTuple):
    """The kind of value that a link keeps under one key of a parameter's state.

    Attributes:
        link: The link that keeps it.
        example: A tensor like it, without memory.
        kinds: Dtypes that load as each other.
    """

    link: Link
    example: Tensor
    kinds: set[torch.dtype]


def entries(p: Tensor, names: GroupKeys) -> dict[str, Entry]:
    """All that the links may keep for a parameter, by key."""
    made: dict[str, Entry] = {}
    for link in names.links:
        of_units: dict[str, Any] = getattr(link.transform, "init_unit", dict)()
        for key, example in link.layout(p).items():
            kinds = WIDTHS if example.shape == p.shape else set()
            kinds = STATISTICS if key.rpartition("/")[2] in of_units else kinds
            made[key] = Entry(link, example, kinds)
    return made


def numbered(
    given: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Tensor, Mapping[str, Any]]]:
    """Every parameter with its index in the checkpoint, and what that holds for it."""
    for theirs, ours in zip(given["param_groups"], param_groups, strict=True):
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            yield index, p, given["state"].get(index, {})


def with_keys(given: Mapping[str, Any], wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """A checkpoint with those entries of its parameters' state whose keys are wanted."""
    state = dict(given["state"])
    for index in [index for group in given["param_groups"] for index in group["params"]]:
        if index in state:
            state[index] = {key: x for key, x in state[index].items() if wanted(key)}
    return {**given, "state": state}


def is_users(key: Any) -> bool:
    """Whether a key of state is the user's, or a wrapper's: ours begin with a link's path."""
    return not (isinstance(key, str) and "/" in key)


def take_counts(given: Mapping[str, Any], seen: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Copy these counts from the groups of one checkpoint to another's, where they are there."""
    for group, source in zip(seen["param_groups"], given["param_groups"], strict=True):
        for key in [key for key in keys if key in source["chain"]]:
            check_count("a group", key, source["chain"][key])
            group["chain"][key] = source["chain"][key]


def check_count(where: str, key: str, value: Any) -> None:
    """Raise a sentence unless a count is a whole number that has not lost its way."""
    if isinstance(value, Tensor) and value.is_meta:
        return
    one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(one, (int, float)) and 0 <= one < 2**63 and one % 1 == 0:
        return
    raise ValueError(
        f"the checkpoint has {one!r} for {key!r} of {where}, which counts: it must be a whole "
        "number and at least 0"
    )


def check_kind(what: str, value: Any, kind: Any, words: str) -> None:
    """Raise a sentence unless a value is of a kind, which `words` name."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} must be {words}, got {type(value).__name__}")


def check_state(
    where: str,
    held: Mapping[str, Any],
    shared: Mapping[str, Any],
    p: Tensor,
    names: GroupKeys,
    rows: Sequence[Sequence[Link]],
) -> None:
    """Raise a sentence unless this is the state of a parameter: all that links need, no more."""
    known = entries(p, names)
    for row in rows:
        expected = {key for key, entry in known.items() if entry.link in row}
        common = {f"{link.path}/{name}" for link in row for name in link.group_values()}
        missing = sorted((expected - held.keys()) | (common - shared.keys()))
        if missing and not expected.isdisjoint(held):
            raise ValueError(f"the checkpoint lacks {', '.join(map(repr, missing))} of {where}")
    for key, (link, example, kinds) in known.items():
        if key in held:
            check_value(where, key, held[key], example, kinds)
            _check_if_count(where, link, key, held[key])
    if left := {key for key in held if not is_users(key)} - known.keys():
        raise ValueError(f"the checkpoint has {sorted(left)} for {where}, which no link makes")


def check_shared(
    where: str, shared: Mapping[str, Any], params: Sequence[Tensor], names: GroupKeys
) -> None:
    """Raise a sentence unless this is the state that links keep once for a group."""
    left = {key for key in shared if not is_users(key)}
    for link in names.links:
        own = {k for k in left if k.rpartition("/")[0] == link.path}
        made = {f"{link.path}/{name}": value for name, value in link.group_values().items()}
        for key, value in made.items():
            if own and params and key not in own:
                raise ValueError(f"the checkpoint lacks {key!r} of {where}")
            if own and params:
                check_value(where, key, shared[key], statistic(value, params[0]), STATISTICS)
        for key in own:
            _check_if_count(where, link, key, shared[key])
        left -= made.keys() if _is_plain(link) else own
    if left:
        raise ValueError(f"the checkpoint has {sorted(left)} for {where}, which no link makes")


def check_value(
    where: str, key: str, value: Any, example: Tensor, kinds: Any = frozenset()
) -> None:
    """Raise a sentence where a value has another form than the example; `kinds` load as another."""
    here = f"{key!r} of {where}"
    if not isinstance(value, Tensor):
        if example.dim() or not _is_number(value):
            raise ValueError(
                f"the checkpoint has {value!r} where {here} is a tensor of shape "
                f"{tuple(example.shape)}"
            )
    elif value.shape != example.shape:
        raise ValueError(
            f"the checkpoint has shape {tuple(value.shape)} for {here}, here it is "
            f"{tuple(example.shape)}"
        )
    elif value.dtype != example.dtype and not {value.dtype, example.dtype} <= kinds:
        raise ValueError(
            f"the checkpoint has dtype {value.dtype} for {here}, here it is {example.dtype}"
        )


def _is_number(value: Any) -> bool:
    """Whether this is a number that a tensor can hold."""
    try:
        return isinstance(value, numbers.Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def _check_if_count(where: str, link: Link, key: str, value: Any) -> None:
    ours = type(link.transform).__module__.partition(".")[0] == __name__.partition(".")[0]
    if ours and key.rpartition("/")[2] in COUNTS:
        check_count(where, key, value)


def rows_of(names: GroupKeys) -> list[list[Link]]:
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
