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
from torchzero_clip.core.matrices import matrix_key
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.state import statistic
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.traits import Gate, Sometimes
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
        self._companies = _companies(links)

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
        name: str | None = None,
    ) -> None:
        """Raise a sentence unless this is all the state that links need for a parameter, no more.

        `shared` is the state of its group, and `clips` says whether norm rules look at it.
        """
        known = {**self.of_parameter(p), **self._of_matrices(held)}
        asked = self._asked(known, name, p)
        later_seen = False
        for company in reversed(self._companies):
            links = [x for x in company.links if clips or not getattr(x.transform, "clips", False)]
            paths = {link.path for link in links}
            expected = {key for key in asked if key.rpartition("/")[0] in paths}
            common = {f"{link.path}/{name}" for link in links for name in link.group_values()}
            seen = not expected.isdisjoint(held)
            missing = sorted((expected - held.keys()) | (common - shared.keys()))
            needed = seen or company.let_in(held) or (later_seen and not company.apart)
            if missing and needed:
                raise ValueError(f"the checkpoint lacks {', '.join(map(repr, missing))} of {where}")
            known_gate = company.gate is None or _is_ours(company.gate)
            later_seen = (later_seen or seen) and known_gate
        for key, entry in known.items():
            if key in held:
                entry.check(where, key, held[key])
                _check_if_count(where, entry.link, key, held[key])
        _refuse_rest(where, set(filter(is_links, held)) - known.keys())

    def _asked(self, known: Mapping[str, Entry], name: str | None, p: Tensor) -> set[str]:
        """Return the keys of the state that the links keep once they have acted on a parameter."""
        keys = set(known)
        for link in self.links:
            rule = link.transform
            if not getattr(rule, "keeps_matrices", False):
                continue
            rows = _rows_of(rule, name or "", p)
            for b, count in enumerate(rows):
                with torch.device("meta"):
                    made = rule.init_matrix(count, p.numel() // sum(rows))
                keys |= {matrix_key(link.path, state, b) for state in made}
            if not rows and rule.drops != "first":
                keys.discard(f"{link.path}/{BEGUN}")
        return keys

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


def _rows_of(rule: Any, name: str, p: Tensor) -> Sequence[int]:
    """Return the rows of the matrices that a parameter is to a rule; none if the rule refuses it.

    A rule inside Partition or Masked is asked about parameters that it never sees.
    """
    try:
        rows: Sequence[int] = rule.rows_of(name, p)
    except (TypeError, ValueError):
        return []
    return rows


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
    if link is not None and _is_ours(link) and key.rpartition("/")[2] in COUNTS:
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


class Company(NamedTuple):
    """Links that act on a parameter in the same steps, so that it has the state of all or of none.

    Attributes:
        links: The links, first to last.
        gate: The link before them that may keep a parameter from them, if there is one.
        apart: Whether they are inside a link that some parameters, or some steps, pass by.
    """

    links: list[Link]
    gate: Link | None = None
    apart: bool = False

    def let_in(self, held: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter says that its gate has let the parameter through."""
        if self.gate is None or not isinstance(self.gate.transform, Gate):
            return False
        path = f"{self.gate.path}/"
        own = {key.removeprefix(path): x for key, x in held.items() if str(key).startswith(path)}
        return self.gate.transform.passed(own)


def _companies(links: Sequence[Link]) -> list[Company]:
    """Return the companies of the links of a chain, first to last."""
    companies: list[Company] = []
    skips = any([getattr(link.transform, "place", "") == "first" for link in links])

    def begin(gate: Link | None, apart: bool) -> Company:
        companies.append(Company([], gate, apart))
        return companies[-1]

    def join(links: Sequence[Link], company: Company) -> Company:
        """Add links that a parameter passes one after another; return the company of the last."""
        for link in [link for link in links if link.transforms]:
            tfm = link.transform
            if skips and not _is_plain(link):  # it may read the flag of a guard, and end the step
                company = begin(None, company.apart)
            company.links.append(link)
            children = list(link.children)
            if not _is_passed_by_all(link):
                ways = [children] if tfm.inner == "chain" else [[child] for child in children]
                for way in ways:
                    join(way, begin(link, True))
                children = []
            before_drop = tfm.children_before_drop if isinstance(tfm, Gate) else 0
            company = join(children[:before_drop], company)
            if tfm.drops or not (_is_plain(link) or _is_ours(link)):
                company = begin(link, company.apart)
            company = join(children[before_drop:], company)
        return company

    join([link for link in links if "/" not in link.path], begin(None, False))
    return companies


def _is_passed_by_all(link: Link) -> bool:
    """Whether all parameters that reach a link go through all transforms inside it, in each step.

    Of a class that is not of this library nothing is known.
    """
    rule = link.transform
    return _is_ours(link) and not (rule.asks or isinstance(rule, Sometimes))


def _is_ours(link: Link) -> bool:
    return type(link.transform).__module__.partition(".")[0] == OURS


def _is_plain(link: Link) -> bool:
    """Whether the link has no step of its own, so that it acts in every step and ends none."""
    return getattr(type(link.transform), "step", None) in (Transform.step, NormRule.step)
