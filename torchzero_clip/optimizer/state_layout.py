"""The class `StateLayout`: which state an optimizer keeps, and checks of this state."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN
from torchzero_clip.core.cohort import Cohort, label
from torchzero_clip.core.formats import KEPT
from torchzero_clip.core.formats.stochastic import DRAWS, DROPPED, ROUNDS
from torchzero_clip.core.link import Link
from torchzero_clip.core.logical_matrices import LogicalMatrices
from torchzero_clip.core.matrices import matrix_key
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.sharding.layout import Layout, described, layout_of, local
from torchzero_clip.core.sharding.owned_tensors import evenly
from torchzero_clip.core.state import statistic
from torchzero_clip.core.tensor_kinds import is_inexact, is_sharded
from torchzero_clip.core.traits import Gate, Sometimes
from torchzero_clip.core.transform import Transform, averages
from torchzero_clip.optimizer.averages import SHOWN, TRAINING

COUNTS = frozenset({"step", "count", "seen", "skipped", "consecutive", "begun"})
"""The names of state in this library's links that is a whole number."""
WIDTHS = frozenset({torch.float32, torch.bfloat16})
"""The dtypes of state in the shape of a parameter. State in one dtype loads into the other."""
WEIGHTS = WIDTHS | {torch.float16}
"""The dtypes of saved training weights. Weights in one dtype load into the others."""
STATISTICS = frozenset({torch.float32, torch.float64})
"""The dtypes of unit state. The widest parameter of a unit determines the dtype."""
OURS = __name__.partition(".")[0]
ROUNDING = frozenset({*[form.key for form in KEPT.values()], *ROUNDS, *DRAWS})
"""The state keys of roundings. They belong to no link."""
OTHERS = ROUNDING | {SHOWN, TRAINING}
"""All state keys that belong to no link."""


class Entry(NamedTuple):
    """The kind of value under one state key.

    Attributes:
        example: A meta tensor with the shape and dtype of the value.
        kinds: The dtypes that may be loaded for this key.
        link: The link that keeps the value. The compensation of a rounding belongs to no link.
        spread: The layout of a matrix in a checkpoint, if the checkpoint stores an equal part of
            the matrix for each rank, otherwise None.
    """

    example: Tensor
    kinds: frozenset[torch.dtype] = frozenset()
    link: Link | None = None
    spread: Layout | None = None

    def check(self, where: str, key: str, value: Any) -> None:
        """Raise an error if a value has another form than the example."""
        here = f"{key!r} of {where}"
        example = self.example
        if not isinstance(value, Tensor):
            if example.dim() or not _is_number(value):
                raise ValueError(
                    f"the checkpoint has {value!r} for {here}, but this optimizer needs a tensor "
                    f"of shape {tuple(example.shape)}"
                )
        elif value.shape != example.shape:
            raise ValueError(
                f"the checkpoint has shape {tuple(value.shape)} for {here}, but this optimizer "
                f"needs shape {tuple(example.shape)}"
            )
        elif value.dtype != example.dtype and not {value.dtype, example.dtype} <= self.kinds:
            raise ValueError(
                f"the checkpoint has dtype {value.dtype} for {here}, but this optimizer needs "
                f"dtype {example.dtype}"
            )
        elif (theirs := layout_of(value)) and not theirs.same_places(self.layout):
            raise ValueError(
                f"the checkpoint has {here} as {described(theirs)}, but this optimizer needs "
                f"{described(self.layout)}: load the checkpoint with torch.distributed.checkpoint, "
                "or call full_tensor() of the tensors in the checkpoint on all ranks"
            )

    @property
    def layout(self) -> Layout | None:
        """The layout of the value in a checkpoint, or None for a plain tensor."""
        return self.spread or layout_of(self.example)

    def is_number(self, key: str) -> bool:
        """Return whether the value under a key is a Python number instead of a tensor."""
        if self.link is None:
            return False
        names = (BEGUN, *getattr(self.link.transform, "numbers", ()))
        return key.rpartition("/")[2] in names


class StateLayout:
    """The state that the links of a chain and the rounding of parameters may keep."""

    def __init__(self, links: Sequence[Link], rounding: str) -> None:
        self.links = links
        self.rounding = rounding
        self._companies = _companies(links)

    def of_parameter(self, p: Tensor, name: str | None = None) -> dict[str, Entry]:
        """Return the entries of all state that may be kept for a parameter, by key."""
        entries: dict[str, Entry] = {}
        exact = self.rounding == "exact" and p.dtype in DROPPED
        weights = torch.empty_like(p, dtype=torch.float32, device="meta") if exact else p
        for link in self.links:
            of_units: dict[str, Any] = getattr(link.transform, "init_unit", dict)()
            for key, example in link.layout(weights, name or "").items():
                kinds = WIDTHS if example.shape == p.shape else frozenset()
                if key.rpartition("/")[2] in of_units:
                    kinds = STATISTICS
                entries[key] = Entry(example, kinds, link)
        if self.rounding in KEPT and p.dtype in DROPPED:
            form = KEPT[self.rounding]
            entries[form.key] = Entry(torch.empty_like(p, dtype=form.dtype, device="meta"))
        if any([averages(link.transform) for link in self.links]):
            entries[TRAINING] = Entry(torch.empty_like(p, device="meta"), WEIGHTS)
        return entries

    def check_dtypes(
        self, cohort: Cohort, group: Mapping[str, Any], state: Mapping[Tensor, Any]
    ) -> None:
        """Raise an error if the dtype of a parameter has changed since its state was created."""
        usual = WIDTHS if cohort.state_dtype in WIDTHS else {cohort.state_dtype}
        rows = zip(cohort.places, cohort.names, cohort.originals, strict=True)
        for place, name, p in rows:
            own = state.get(p, {})
            tensors = [x for x in own.values() if isinstance(x, Tensor) and x.dtype not in usual]
            if not any([x.dim() and is_inexact(x) for x in tensors]):
                continue
            for key, entry in self.of_parameter(p, name).items():
                value = own.get(key)
                fixed = isinstance(value, Tensor) and entry.kinds is not STATISTICS
                if fixed and value.dtype != entry.example.dtype:
                    raise TypeError(
                        f"{label(cohort.index, group, place)} has dtype {p.dtype}, but its state "
                        f"{key!r} has dtype {value.dtype}: convert the model before you "
                        "construct the optimizer, or call optimizer.state.clear()"
                    )

    def check_parameter(
        self,
        where: str,
        state: Mapping[str, Any],
        shared: Mapping[str, Any],
        p: Tensor,
        clips: bool = True,
        name: str | None = None,
    ) -> None:
        """Raise an error unless a parameter has exactly the state that the links need.

        Args:
            where: The name of the parameter, for errors.
            state: The state of the parameter in the checkpoint.
            shared: The state of the parameter's group.
            p: The parameter.
            clips: Whether norm rules act on the parameter's group.
            name: The name of the parameter, if it has one.
        """
        known = self.of_parameter(p, name)
        complete = set(known)
        for link in [link for link in self.links if matrix_names(link.transform)]:
            entries = _of_matrices(link, name or "", p)
            known.update(entries)
            complete |= entries.keys()
            if not entries and link.transform.drops != "first":
                complete.discard(f"{link.path}/{BEGUN}")
        later_seen = False
        for company in reversed(self._companies):
            links = [x for x in company.links if clips or not getattr(x.transform, "clips", False)]
            paths = {link.path for link in links}
            expected = {key for key in complete if key.rpartition("/")[0] in paths}
            common = {f"{link.path}/{name}" for link in links for name in link.group_values()}
            seen = not expected.isdisjoint(state)
            missing = sorted((expected - state.keys()) | (common - shared.keys()))
            needed = seen or company.let_in(state) or (later_seen and not company.apart)
            if missing and needed:
                names = ", ".join(map(repr, missing))
                raise ValueError(
                    f"the checkpoint has no state {names} for {where}{self._other_dim(missing)}"
                )
            known_gate = company.gate is None or _is_ours(company.gate)
            later_seen = (later_seen or seen) and known_gate
        for key, entry in known.items():
            if key in state:
                entry.check(where, key, state[key])
                _check_if_count(where, entry.link, key, state[key])
        self._refuse_rest(where, set(filter(is_links, state)) - known.keys())

    def check_group(self, where: str, shared: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Raise an error unless a group has exactly the group state that links keep."""
        unchecked = set(filter(is_links, shared))
        for link in self.links:
            own = {key for key in unchecked if key.rpartition("/")[0] == link.path}
            expected = {f"{link.path}/{name}": value for name, value in link.group_values().items()}
            for key, value in expected.items() if own and params else ():
                variants = [own_key for own_key in own if _without_norm_group(own_key) == key]
                if not variants:
                    raise ValueError(
                        f"the checkpoint has no state {key!r} for {where}{self._other_dim([key])}"
                    )
                for variant in variants:
                    entry = Entry(statistic(value, params[0]), STATISTICS)
                    entry.check(where, variant, shared[variant])
            for key in own:
                _check_if_count(where, link, key, shared[key])
            unchecked -= {
                key for key in own if not _is_plain(link) or _without_norm_group(key) in expected
            }
        self._refuse_rest(where, unchecked)

    def _refuse_rest(self, where: str, keys: set[str]) -> None:
        """Raise an error if a checkpoint has state that no link keeps."""
        if keys:
            raise ValueError(
                f"the checkpoint has the state {sorted(keys)} for {where}, but no transform of "
                f"this optimizer has such state{self._other_dim(keys)}"
            )

    def _other_dim(self, keys: Collection[str]) -> str:
        """Return the probable cause of an error about state of norm rules, or an empty text."""
        known: set[str] = set()
        for link in self.links:
            if isinstance(link.transform, NormRule):
                known |= {f"{link.path}/{name}" for name in link.transform.init_unit()}
        paths = {key.rpartition("/")[0] for key in keys if _without_norm_group(key) in known}
        if not paths:
            return ""
        return (
            f": {min(paths)} may have had another dim= when the checkpoint was saved, or another "
            "argument that decides where its state is stored"
        )

    def starts_as_nan(self, key: str, p: Tensor | None) -> bool:
        """Return whether state begins as NaN, for example the empty places of a window.

        Args:
            key: The key of the state.
            p: The parameter that the state belongs to, or None for the state of a group.
        """
        path, _, name = _without_norm_group(key).rpartition("/")
        rule = next(link.transform for link in self.links if link.path == path)
        first = rule.per_group() if p is None else rule.per_parameter(p)
        return name in first and bool(local(torch.as_tensor(first[name])).isnan().any())


def _of_matrices(link: Link, name: str, p: Tensor) -> dict[str, Entry]:
    """Return the entries of the state that a link keeps for the matrices of a parameter.

    A rule inside Partition or Masked may refuse parameters that the rule never receives. Such a
    parameter has no matrices.
    """
    rule = link.transform
    try:
        matrices: LogicalMatrices | None = rule.matrices_of(name, p)
    except (TypeError, ValueError):
        matrices = None
    layout = layout_of(p)
    entries: dict[str, Entry] = {}
    for b, size in enumerate([] if matrices is None else matrices.sizes):
        with torch.device("meta"):
            state = rule.init_matrix(*size)
        for own_name, t in state.items():
            spread = evenly(layout, t.shape) if layout else None
            entries[matrix_key(link.path, own_name, b)] = Entry(t, STATISTICS, link, spread)
    return entries


def matrix_names(rule: Any) -> list[str]:
    """Return the names of the state that a rule keeps per matrix."""
    if not getattr(rule, "keeps_matrices", False):
        return []
    with torch.device("meta"):
        return list(rule.init_matrix(2, 3))


def _without_norm_group(key: str) -> str:
    """Return a key of group state after removing the name of a norm group."""
    path, slash, name = key.rpartition("/")
    return path + slash + name.partition("@")[0]


def is_links(key: Any) -> bool:
    """Return whether a state key belongs to a link instead of a user or a wrapper."""
    return isinstance(key, str) and "/" in key and key not in OTHERS


def check_count(where: str, key: str, value: Any) -> None:
    """Raise an error unless a count is a whole number from 0 to 2**63.

    The function does not check the count of a sharded matrix, because the local part may be empty.
    """
    if isinstance(value, Tensor) and (value.is_meta or is_sharded(value)):
        return
    one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(one, (int, float)) and 0 <= one < 2**63 and one % 1 == 0:
        return
    raise ValueError(
        f"the value {key!r} of {where} in the checkpoint must be an integer of at least 0, "
        f"got {one!r}"
    )


def _check_if_count(where: str, link: Link | None, key: str, value: Any) -> None:
    if link is not None and _is_ours(link) and key.rpartition("/")[2] in COUNTS:
        check_count(where, key, value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a tensor can hold."""
    try:
        return isinstance(value, numbers.Real) and isinstance(float(value), float)
    except OverflowError:
        return False


class Company(NamedTuple):
    """A company: links that act in the same steps. A parameter has the state of all or of none.

    Attributes:
        links: The links, first to last.
        gate: The link before the company that may stop a parameter, or None.
        apart: Whether the links are inside another link that some parameters or some steps skip.
    """

    links: list[Link]
    gate: Link | None = None
    apart: bool = False

    def let_in(self, state: Mapping[str, Any]) -> bool:
        """Return whether the state of a parameter shows that the parameter has passed the gate."""
        if self.gate is None or not isinstance(self.gate.transform, Gate):
            return False
        path = f"{self.gate.path}/"
        own = {key.removeprefix(path): x for key, x in state.items() if str(key).startswith(path)}
        return self.gate.transform.passed(own)


def _companies(links: Sequence[Link]) -> list[Company]:
    """Return the companies of the links of a chain, first to last."""
    companies: list[Company] = []
    skips = any([link.is_guard for link in links])

    def begin(gate: Link | None, apart: bool) -> Company:
        companies.append(Company([], gate, apart))
        return companies[-1]

    def join(links: Sequence[Link], company: Company) -> Company:
        """Add links that a parameter passes in order, and return the company of the last link."""
        for link in [link for link in links if link.transforms]:
            tfm = link.transform
            if skips and not _is_plain(link):  # it may read the flag of a guard, and end the step
                company = begin(None, company.apart)
            company.links.append(link)
            children = list(link.children)
            if not _is_passed_by_all(link):
                paths = [children] if tfm.inner == "chain" else [[child] for child in children]
                for path in paths:
                    join(path, begin(link, True))
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
    """Return whether, in each step, all parameters of a link pass all transforms inside it.

    The answer is False for classes outside of this library, because nothing is known about them.
    """
    rule = link.transform
    return _is_ours(link) and not (rule.asks or isinstance(rule, Sometimes))


def _is_ours(link: Link) -> bool:
    return type(link.transform).__module__.partition(".")[0] == OURS


def _is_plain(link: Link) -> bool:
    """Return whether a link has the default step. Such a link acts in every step and ends none."""
    return getattr(type(link.transform), "step", None) in (Transform.step, NormRule.step)
