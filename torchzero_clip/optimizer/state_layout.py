"""StateLayout: what an optimizer keeps for a parameter and a group, and checks of such state."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN
from torchzero_clip.core.formats import KEPT
from torchzero_clip.core.formats.stochastic import DRAWS, DROPPED, ROUNDS
from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.state import statistic
from torchzero_clip.core.tensors import is_sharded
from torchzero_clip.core.transform import Transform, averages
from torchzero_clip.optimizer.averages import SHOWN, TRAINING

COUNTS = frozenset({"step", "count", "seen", "skipped", "consecutive", "begun"})
"""Names of whole numbers in the state of our own links."""
WIDTHS = frozenset({torch.float32, torch.bfloat16})
"""The dtypes of state in the shape of a parameter, which load as each other."""
STATISTICS = frozenset({torch.float32, torch.float64})
"""Those of numbers, which are as wide as a unit's widest parameter."""
OURS = __name__.partition(".")[0]
ROUNDING = frozenset({*[kept.key for kept in KEPT.values()], *ROUNDS, *DRAWS})
"""Keys that no link keeps, but the rounding of parameters and state."""
OTHERS = ROUNDING | {SHOWN, TRAINING}
"""Keys that no link keeps."""


class Entry(NamedTuple):
    """The kind of value that is kept under one key.

    Attributes:
        example: A tensor like it, without memory.
        kinds: Dtypes that load as each other.
        link: The link that keeps it; none keeps the compensation of a rounding.
    """

    example: Tensor
    kinds: frozenset[torch.dtype] = frozenset()
    link: Link | None = None

    def check(self, where: str, key: str, value: Any) -> None:
        """Raise a sentence where a value has another form than the example."""
        here, example = f"{key!r} of {where}", self.example
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
        elif value.dtype != example.dtype and not {value.dtype, example.dtype} <= self.kinds:
            raise ValueError(
                f"the checkpoint has dtype {value.dtype} for {here}, here it is {example.dtype}"
            )

    def is_number(self, key: str) -> bool:
        """Whether this is a Python number, which never was on a device."""
        numbers = (BEGUN, *getattr(self.link and self.link.transform, "numbers", ()))
        return self.link is not None and key.rpartition("/")[2] in numbers


class StateLayout:
    """All that the links of a chain may keep, and a rounding of parameters."""

    def __init__(self, links: Sequence[Link], rounding: str) -> None:
        self.links, self.rounding = links, rounding
        self._rows = _rows(links)

    def of_parameter(self, p: Tensor) -> dict[str, Entry]:
        """What may be kept for a parameter, by key."""
        made: dict[str, Entry] = {}
        exact = self.rounding == "exact" and p.dtype in DROPPED
        seen = torch.empty_like(p, dtype=torch.float32, device="meta") if exact else p
        for link in self.links:
            of_units: dict[str, Any] = getattr(link.transform, "init_unit", dict)()
            for key, example in link.layout(seen).items():
                kinds = WIDTHS if example.shape == p.shape else frozenset()
                kinds = STATISTICS if key.rpartition("/")[2] in of_units else kinds
                made[key] = Entry(example, kinds, link)
        if self.rounding in KEPT and p.dtype in DROPPED:
            kept = KEPT[self.rounding]
            made[kept.key] = Entry(torch.empty_like(p, dtype=kept.dtype, device="meta"))
        if any([averages(link.transform) for link in self.links]):
            made[TRAINING] = Entry(torch.empty_like(p, device="meta"))
        return made

    def check_dtypes(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Any]
    ) -> None:
        """Raise a sentence where state has no longer the dtype that its parameter asks for."""
        for g, group in enumerate(param_groups):
            for i, p in enumerate(group["params"]):
                for key, entry in self.of_parameter(p).items() if state.get(p) else ():
                    held = state[p].get(key)
                    own = isinstance(held, Tensor) and entry.kinds is not STATISTICS
                    if own and held.dtype != entry.example.dtype:
                        raise TypeError(
                            f"parameter {i} of group {g} is {p.dtype} now, and its state {key!r} "
                            f"still {held.dtype}: convert a model before its optimizer is made, or "
                            "let the state begin anew with optimizer.state.clear()"
                        )

    def check_parameter(
        self,
        where: str,
        held: Mapping[str, Any],
        shared: Mapping[str, Any],
        p: Tensor,
        clips: bool = True,
    ) -> None:
        """Raise a sentence unless this is all the state that links need for a parameter, no more.

        `shared` is the state of its group, and `clips` says whether norm rules look at it.
        """
        known = {**self.of_parameter(p), **self._of_matrices(held)}
        for row in self._rows:
            row = [link for link in row if clips or not getattr(link.transform, "clips", False)]
            expected = {key for key, entry in known.items() if entry.link in row}
            common = {f"{link.path}/{name}" for link in row for name in link.group_values()}
            missing = sorted((expected - held.keys()) | (common - shared.keys()))
            if missing and not expected.isdisjoint(held):
                raise ValueError(f"the checkpoint lacks {', '.join(map(repr, missing))} of {where}")
        for key, entry in known.items():
            if key in held:
                entry.check(where, key, held[key])
                _check_if_count(where, entry.link, key, held[key])
        _refuse_rest(where, set(filter(is_links, held)) - known.keys())

    def _of_matrices(self, held: Mapping[str, Any]) -> dict[str, Entry]:
        """What is kept of matrices, whose form the link checks where it meets them."""
        made: dict[str, Entry] = {}
        for link in self.links:
            names = set(matrix_names(link.transform))
            for key, value in held.items() if names else ():
                path, _, name = key.rpartition("/")
                if path == link.path and re.sub(r"_[0-9]+$", "", name) in names:
                    like = value if isinstance(value, Tensor) else torch.empty(1, device="meta")
                    made[key] = Entry(like, frozenset(), link)
        return made

    def check_group(self, where: str, shared: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Raise a sentence unless this is the state that links keep once for a group."""
        left = set(filter(is_links, shared))
        for link in self.links:
            own = {key for key in left if key.rpartition("/")[0] == link.path}
            made = {f"{link.path}/{name}": value for name, value in link.group_values().items()}
            for key, value in made.items() if own and params else ():
                alike = [one for one in own if _shared_name(one) == key]
                if not alike:
                    raise ValueError(f"the checkpoint lacks {key!r} of {where}")
                for one in alike:
                    Entry(statistic(value, params[0]), STATISTICS).check(where, one, shared[one])
            for key in own:
                _check_if_count(where, link, key, shared[key])
            left -= {key for key in own if not _is_plain(link) or _shared_name(key) in made}
        _refuse_rest(where, left)

    def starts_as_nan(self, key: str, p: Tensor | None) -> bool:
        """Whether state of a parameter, or of a group, is NaN until something is known, as the
        places of an empty window.
        """
        path, _, name = _shared_name(key).rpartition("/")
        rule = next(link.transform for link in self.links if link.path == path)
        made = rule.per_group() if p is None else rule.per_parameter(p)
        return name in made and bool(local(torch.as_tensor(made[name])).isnan().any())


def matrix_names(rule: Any) -> list[str]:
    """The names of the state that a rule keeps of matrices."""
    if not getattr(rule, "keeps_matrices", False):
        return []
    with torch.device("meta"):
        return list(rule.init_matrix(2, 3))


def _shared_name(key: str) -> str:
    """A key without the norm group whose state it has."""
    path, slash, name = key.rpartition("/")
    return path + slash + name.partition("@")[0]


def is_links(key: Any) -> bool:
    """Whether a key of state is a link's, and begins with its path; no user's or wrapper's does."""
    return isinstance(key, str) and "/" in key and key not in OTHERS


def check_count(where: str, key: str, value: Any) -> None:
    """Raise a sentence unless a count is a whole number that has not lost its way.

    That of a matrix lies in parts, which may be empty here.
    """
    if isinstance(value, Tensor) and (value.is_meta or is_sharded(value)):
        return
    one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(one, (int, float)) and 0 <= one < 2**63 and one % 1 == 0:
        return
    raise ValueError(
        f"the checkpoint has {one!r} for {key!r} of {where}, which counts: it must be a whole "
        "number and at least 0"
    )


def _check_if_count(where: str, link: Link | None, key: str, value: Any) -> None:
    ours = link is not None and type(link.transform).__module__.partition(".")[0] == OURS
    if ours and key.rpartition("/")[2] in COUNTS:
        check_count(where, key, value)


def _refuse_rest(where: str, keys: set[str]) -> None:
    if keys:
        raise ValueError(f"the checkpoint has {sorted(keys)} for {where}, which no link makes")


def _is_number(value: Any) -> bool:
    """Whether this is a number that a tensor can hold."""
    try:
        return isinstance(value, numbers.Real) and isinstance(float(value), float)
    except OverflowError:
        return False


def _rows(links: Sequence[Link]) -> list[list[Link]]:
    """Links of which a parameter has the state of all or of none.

    Those are one link, and plain links of the chain that follow each other.
    """
    tops = [link for link in links if "/" not in link.path]
    rows = [[link] for link in links if link not in tops]
    for before, link in zip([None, *tops], tops, strict=False):
        whole = before and before.transform.drops != "first" and _is_plain(before)
        if whole and _is_plain(link):
            rows[-1].append(link)
        else:
            rows.append([link])
    return rows


def _is_plain(link: Link) -> bool:
    """Whether the link has no step of its own, so that it acts in every step and ends none."""
    return getattr(type(link.transform), "step", None) in (Transform.step, NormRule.step)
