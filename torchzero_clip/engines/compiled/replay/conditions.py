"""Conditions: what must still hold for a replay, of parameters, gradients and state."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.description import Description
from torchzero_clip.core.gradients import GradPlace, odd
from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import aligned_grads, locals_of
from torchzero_clip.core.step import Groups
from torchzero_clip.core.tensor_kinds import LAYOUT, REAL, SHAPE, addresses, all_here
from torchzero_clip.core.torch_private import base
from torchzero_clip.engines.buffers import Buffer, apart
from torchzero_clip.engines.compiled.replay.native_forms import NativeForms, forms_of
from torchzero_clip.engines.compiled.replay.step_recorder import Refused

UNSAID = (
    "does not say `pure = True`: that its methods hang on their arguments alone and branch on no "
    "value. Where that holds say it, and test it by `torchzero_clip.testing.check_pure`"
)
OURS = __name__.partition(".")[0]
States = Mapping[Tensor, dict[str, Any]]


class Conditions:
    """The tensors of a step, by identity, address and form; they are compared before a replay.

    Gradients are other tensors in every step. Their dtypes and shapes are compared, and whether
    their memory is apart from that of the parameters. Their strides and storage offsets are
    compared if operators of PyTorch were recorded on them: see `keep_layout`.
    """

    def __init__(
        self, cohorts: Sequence[Cohort], groups: Groups, states: States, place: GradPlace
    ) -> None:
        self._cohorts, self._place = list(cohorts), place
        self._rows = [list(group["params"]) for group in groups]
        self._sharded = any([cohort.sharded for cohort in cohorts])
        self._params = [Buffer(locals_of(cohort.originals)) for cohort in cohorts]
        grads = [list(map(place.of, row)) for row in self._rows]
        self._grads = [Buffer(locals_of(cohort.of(grads[cohort.index]))) for cohort in cohorts]
        self._shapes = [list(map(SHAPE, buffer.tensors)) for buffer in self._params]
        self._keys, self._states = list(states), list(states.values())
        self._numbers = [
            (state, name, x)
            for state in self._states
            for name, x in state.items()
            if not isinstance(x, Tensor)
        ]
        self._tensors = Buffer(self._found(groups))
        self._seen = forms_of(self._tensors.tensors)
        self._keeps_layout = False
        self._offsets = [list(map(Tensor.storage_offset, row.tensors)) for row in self._grads]
        self._seen_grads: list[NativeForms | None] = []
        for row in self._grads:
            seen = forms_of(row.tensors) if row.contiguous and self._seen else None
            self._seen_grads.append(seen)
            row.tensors.clear()  # they go with their step
        self._counts: set[str] = set()  # the keys of what each step counts
        self._said = self._says(groups, grads)
        self._bases, self._starts = list[Tensor](), list[int]()
        self._apart: list[Any] = []  # where gradients were that are known to lie apart

    def leave_out(self, counts: Collection[str]) -> None:
        """Let these values of groups be others in every step."""
        self._counts |= set(counts)
        self._said[-1] = [pair for pair in self._said[-1] if pair[0] not in counts]

    def keep_layout(self) -> None:
        """Require gradients of the same strides and offsets in their storage.

        What `contiguous`, `view`, `flatten` or `as_strided` do depends on them, so the operators
        that were recorded may be wrong, or raise, for gradients of another layout.
        """
        self._keeps_layout = True

    def know(self, leaves: Sequence[Any], others: Sequence[Tensor]) -> None:
        """Raise where a tensor is neither one of the others, nor of state, nor the base of such."""
        taken = set(map(id, leaves))
        bases = {id(t): t for t in map(base, self._tensors.tensors) if id(t) in taken}
        self._bases = [t for t in bases.values() if t is not None]
        self._starts = addresses(self._bases) or []
        known = bases.keys() | {id(t) for t in [*self._tensors.tensors, *others]}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                why = "is neither state nor a rule's field: make it one"
                raise Refused(f"a tensor of {leaf.shape} {why}")

    def hold(self, groups: Groups, states: States) -> list[Buffer] | None:
        """The gradients as buffers where all is as it was; otherwise None."""
        rows = [group["params"] for group in groups]
        if len(rows) != len(self._rows) or not all(map(_same, rows, self._rows)):
            return None
        if self._sharded or not self._place.usual:
            grads = [aligned_grads(row, self._place) for row in rows]
        else:
            grads = [[p.grad for p in row] for row in rows]
        if not (_same(states, self._keys) and _same(states.values(), self._states)):
            return None
        if self._says(groups, grads) != self._said:
            return None
        if not all([_equal(state.get(name), x) for state, name, x in self._numbers]):
            return None
        if not self._same(self._found(groups)):
            return None
        if addresses(self._bases) != self._starts:
            return None
        found = [cohort.of(grads[cohort.index]) for cohort in self._cohorts]
        return self._gradients(list(map(locals_of, found)) if self._sharded else found)

    def _says(self, groups: Groups, grads: Sequence[Sequence[Any]]) -> list[Any]:
        """What is compared by value: kinds of gradients, names, and what groups keep."""
        named = [
            (group.get("clip"), group.get("norm_group"), *(group.get("param_names") or ()))
            for group in groups
        ]
        counts, names = list(map(len, self._states)), list(itertools.chain(*self._states))
        in_groups = [
            (key, None if isinstance(x, Tensor) else repr(x))
            for group in groups
            for key, x in group["chain"].items()
            if key not in self._counts
        ]
        return [[list(map(type, row)) for row in grads], named, counts, names, in_groups]

    def _same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were there, in the memory and form that they had."""
        if self._seen is None:
            return self._tensors.same(tensors)
        return _same(tensors, self._tensors.tensors) and self._seen.hold()

    def _like(self, i: int, grads: Sequence[Tensor]) -> Buffer | None:
        """The gradients of a cohort as a buffer where they are as they were."""
        offsets = map(Tensor.storage_offset, grads) if self._keeps_layout else self._offsets[i]
        if list(offsets) != self._offsets[i]:
            return None
        seen = self._seen_grads[i]
        starts = seen.of(grads) if seen and not any(map(Tensor.is_neg, grads)) else None
        if starts is not None:
            return self._grads[i].moved(grads, starts)
        if not {torch.strided}.issuperset(map(LAYOUT, grads)):
            return None
        buffer, rows = Buffer(grads), (self._params[i].tensors, grads)
        forms, before = buffer.forms, self._grads[i].forms
        like = forms == before if self._keeps_layout else forms[0] == before[0]
        like = like and all([list(map(SHAPE, row)) == self._shapes[i] for row in rows])
        return buffer if like and (buffer.contiguous or not odd(grads)) else None

    def _gradients(self, grads: Sequence[Sequence[Tensor]]) -> list[Buffer] | None:
        """The gradients as buffers where they are as they were."""
        found = [self._like(i, row) for i, row in enumerate(grads)]
        buffers = [buffer for buffer in found if buffer is not None]
        if len(buffers) < len(found):
            return None
        where = [(buffer.addresses, buffer.forms) for buffer in buffers]
        if where != self._apart and not apart([*self._params, *buffers]):
            return None
        self._apart = where
        return buffers

    def _found(self, groups: Groups) -> list[Tensor]:
        """All tensors: parameters, and what is in their state and in the groups."""
        tensors = [p for cohort in self._cohorts for p in cohort.originals]
        state = itertools.chain.from_iterable(map(dict.values, self._states))
        tensors += [x for x in state if isinstance(x, Tensor)] if self._numbers else state
        for group in groups:
            tensors += [x for x in group["chain"].values() if isinstance(x, Tensor)]
        return locals_of(tensors) if self._sharded else tensors


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    """Whether these are the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _equal(x: Any, number: Any) -> bool:
    """Whether a number is what it was."""
    return type(x) is type(number) and bool(x == number)


def impure(links: Sequence[Link]) -> list[str]:
    """The reasons why a chain may not be replayed, whatever its steps do.

    A class says itself that it is pure: what inherits from it may be something else.
    """
    inside = [(link.path, one) for link in links for one in link.transform.walk()]
    return [f"{path}: {why}" for path, one in inside for why in _unsaid(one)]


def _unsaid(one: Description) -> list[str]:
    kind, found = type(one), list[str]()
    if not vars(kind).get("pure", False):
        return [kind.impure or f"{kind.__name__} {UNSAID}"]
    for name, value in vars(one).items():
        known = name in kind.asks or getattr(value, "pure", False)
        ours = (getattr(value, "__module__", None) or "").partition(".")[0] == OURS
        if callable(value) and not (known or ours):
            found.append(f"{name} may do anything: where it is pure say `{name}.pure = True`")
    return found


def subclassed(cohorts: Sequence[Cohort], states: States, place: GradPlace) -> str | None:
    """The reason why a step of such tensors is not replayed; None where all are plain."""
    params = [p for cohort in cohorts for p in cohort.originals]
    values = [x for state in states.values() for x in state.values()]
    rows: dict[str, list[Any]] = {"parameters": params}
    rows["state"] = [x for x in values if type(x) not in (int, float, bool)]
    rows["gradients"] = list(map(place.of, params))
    if not all(map(operator.is_, locals_of(params), locals_of(params))):
        return "this torch does not say which tensors hold the parts of sharded parameters"
    for what, row in rows.items():
        here = locals_of(row)
        if not all_here(here):
            kinds = ", ".join(sorted({type(x).__name__ for x in here if type(x) not in REAL}))
            return f"{what} are no plain tensors ({kinds}): leave compile out"
    return None
