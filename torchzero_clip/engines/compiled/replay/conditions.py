"""Conditions for a replay: everything that must be the same as when the step was recorded.

A `Conditions` object is made when a step is recorded. It stores the identities, addresses, dtypes
and shapes of the parameters and of all state. It also stores the numbers and names in state and
groups. Before each replay, `Conditions.check` compares the stored values with the new step. If
nothing has changed, `Conditions.check` returns the gradients of the new step.

Some chains and models are never recorded. `impure` and `subclassed` return the reasons, and
`explain()` prints the reasons. A cohort is a list of parameters that have a gradient and share
group, device and dtype.
"""

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
from torchzero_clip.engines.buffers import Buffer, disjoint
from torchzero_clip.engines.compiled.replay.native_forms import NativeForms, forms_of
from torchzero_clip.engines.compiled.replay.step_recorder import Refused

UNSAID = (
    "does not set `pure = True`. Set `pure = True` if the methods of the class depend only "
    "on their arguments and never branch on the value of a tensor, and test the class with "
    "`torchzero_clip.testing.check_pure`"
)
OURS = __name__.partition(".")[0]
"""The name of this library. Full names of the library's modules begin with this name."""
States = Mapping[Tensor, dict[str, Any]]


class Conditions:
    """The conditions for a replay: tensors and values that must not have changed since recording.

    Parameters and state must be the same tensors at the same addresses. Gradients may be new
    tensors in every step. Gradients must have the recorded dtypes and shapes, and must not share
    memory with parameters. Strides and storage offsets of gradients are compared only if the
    recorded step calls PyTorch operators on gradients: see `keep_layout`.

    Args:
        cohorts: The parameters that have a gradient, split by group, device and dtype.
        groups: The parameter groups.
        states: The state of each parameter.
        place: The place where gradients are stored, usually `.grad`.
    """

    def __init__(
        self, cohorts: Sequence[Cohort], groups: Groups, states: States, place: GradPlace
    ) -> None:
        self._cohorts = list(cohorts)
        self._place = place
        self._groups = [list(group["params"]) for group in groups]
        self._sharded = any([cohort.sharded for cohort in cohorts])
        # parameters and gradients, a buffer for each cohort
        self._params = [Buffer(locals_of(cohort.originals)) for cohort in cohorts]
        grads = [list(map(place.of, params)) for params in self._groups]
        self._grads = [Buffer(locals_of(cohort.of(grads[cohort.index]))) for cohort in cohorts]
        self._shapes = [list(map(SHAPE, buffer.tensors)) for buffer in self._params]
        # all state, and the numbers in it
        self._owners = list(states)
        self._states = list(states.values())
        self._numbers = [
            (state, name, x)
            for state in self._states
            for name, x in state.items()
            if not isinstance(x, Tensor)
        ]
        self._tensors = Buffer(self._all_tensors(groups))
        self._tensor_forms = forms_of(self._tensors.tensors)
        # the layouts of gradients
        self._keeps_layout = False
        self._offsets = [list(map(Tensor.storage_offset, row.tensors)) for row in self._grads]
        self._grad_forms: list[NativeForms | None] = []
        for buffer in self._grads:
            native = buffer.contiguous and self._tensor_forms is not None
            self._grad_forms.append(forms_of(buffer.tensors) if native else None)
            buffer.tensors.clear()  # a recorded step must not keep its gradients alive
        self._ignored_keys: set[str] = set()
        self._values = self._values_of(groups, grads)
        # tensors that the graph reads but that are not in `_tensors`: bases of views, and fields
        self._bases_and_fields = list[Tensor]()
        self._their_addresses = list[int]()
        self._disjoint_at: list[Any] = []  # addresses and forms of gradients known to be disjoint

    def ignore(self, keys: Collection[str]) -> None:
        """Do not compare the values of these keys in groups, because each step increases them."""
        self._ignored_keys = set(keys)
        self._values[-1] = [pair for pair in self._values[-1] if pair[0] not in keys]

    def keep_layout(self) -> None:
        """Require gradients with the same strides and storage offsets.

        The result of `contiguous`, `view`, `flatten` or `as_strided` depends on strides and storage
        offsets. So the recorded operators may give wrong results or raise an error if a gradient
        has another layout.
        """
        self._keeps_layout = True

    def check_inputs(
        self, leaves: Sequence[Any], fields: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Raise `Refused` if the graph has an input that no condition covers.

        Args:
            leaves: The inputs of the step graph. A tensor among the inputs must be a parameter, a
                state tensor, the base of a state tensor that is a view, or one of `fields` or
                `others`.
            fields: Fields of transforms. Users cannot replace them, but `field.data = new` moves
                the values of a field to another address.
            others: Tensors that need no condition. Every replay supplies some of them, such as
                gradients. The others never change their addresses.
        """
        taken = set(map(id, leaves))
        compared = {
            id(t): t for t in [*map(base, self._tensors.tensors), *fields] if id(t) in taken
        }
        self._bases_and_fields = [t for t in compared.values() if t is not None]
        self._their_addresses = addresses(self._bases_and_fields) or []
        known = compared.keys() | {id(t) for t in [*self._tensors.tensors, *others]}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                remedy = (
                    "return the tensor from init, or store the tensor in a field of the transform"
                )
                raise Refused(
                    f"a rule uses a tensor of shape {tuple(leaf.shape)} that is neither state nor "
                    f"a field of the transform: {remedy}"
                )

    def check(self, groups: Groups, states: States) -> list[Buffer] | None:
        """Return the gradients of a step if every condition holds, otherwise return None.

        The gradients of each cohort are one buffer.
        """
        params = [group["params"] for group in groups]
        if len(params) != len(self._groups) or not all(map(_same, params, self._groups)):
            return None
        if self._sharded or not self._place.usual:
            grads = [aligned_grads(row, self._place) for row in params]
        else:
            grads = [[p.grad for p in row] for row in params]
        if not (_same(states, self._owners) and _same(states.values(), self._states)):
            return None
        if self._values_of(groups, grads) != self._values:
            return None
        if not all([_equal(state.get(name), x) for state, name, x in self._numbers]):
            return None
        if not self._unchanged(self._all_tensors(groups)):
            return None
        if addresses(self._bases_and_fields) != self._their_addresses:
            return None
        by_cohort = [cohort.of(grads[cohort.index]) for cohort in self._cohorts]
        return self._gradients(list(map(locals_of, by_cohort)) if self._sharded else by_cohort)

    def _values_of(self, groups: Groups, grads: Sequence[Sequence[Any]]) -> list[Any]:
        """Return everything that is compared by value, except numbers in the state of parameters.

        The list has the types of gradients, the names of parameters, the names of state, and the
        values in groups.
        """
        named = [
            (group.get("clip"), group.get("norm_group"), *(group.get("param_names") or ()))
            for group in groups
        ]
        counts = list(map(len, self._states))
        names = list(itertools.chain(*self._states))
        in_groups = [
            (key, None if isinstance(x, Tensor) else repr(x))
            for group in groups
            for key, x in group["chain"].items()
            if key not in self._ignored_keys
        ]
        return [[list(map(type, row)) for row in grads], named, counts, names, in_groups]

    def _unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors are the recorded ones, unchanged in address and form."""
        if self._tensor_forms is None:
            return self._tensors.same(tensors)
        return _same(tensors, self._tensors.tensors) and self._tensor_forms.unchanged()

    def _buffer(self, i: int, grads: Sequence[Tensor]) -> Buffer | None:
        """Return the gradients of the i-th cohort as a buffer, or None if a condition fails."""
        offsets = map(Tensor.storage_offset, grads) if self._keeps_layout else self._offsets[i]
        if list(offsets) != self._offsets[i]:
            return None
        forms = self._grad_forms[i]
        if forms is not None and not any(map(Tensor.is_neg, grads)):
            starts = forms.addresses_of(grads)
            if starts is not None:
                return self._grads[i].with_tensors(grads, starts)
        if not {torch.strided}.issuperset(map(LAYOUT, grads)):
            return None
        buffer = Buffer(grads)
        before = self._grads[i].forms
        if self._keeps_layout:
            same_forms = buffer.forms == before
        else:
            same_forms = buffer.forms[0] == before[0]  # dtypes alone
        tensors = (self._params[i].tensors, grads)
        same_shapes = all([list(map(SHAPE, row)) == self._shapes[i] for row in tensors])
        is_odd = not buffer.contiguous and bool(odd(grads))
        return buffer if same_forms and same_shapes and not is_odd else None

    def _gradients(self, grads: Sequence[Sequence[Tensor]]) -> list[Buffer] | None:
        """Return the gradients of each cohort as a buffer, or None if a condition fails."""
        buffers = list[Buffer]()
        for i, row in enumerate(grads):
            buffer = self._buffer(i, row)
            if buffer is None:
                return None
            buffers.append(buffer)
        where = [(buffer.addresses, buffer.forms) for buffer in buffers]
        if where != self._disjoint_at and not disjoint([*self._params, *buffers]):
            return None
        self._disjoint_at = where
        return buffers

    def _all_tensors(self, groups: Groups) -> list[Tensor]:
        """Return all parameters, all tensors in their state, and all tensors in the groups."""
        tensors = [p for cohort in self._cohorts for p in cohort.originals]
        state = itertools.chain.from_iterable(map(dict.values, self._states))
        tensors += [x for x in state if isinstance(x, Tensor)] if self._numbers else state
        for group in groups:
            tensors += [x for x in group["chain"].values() if isinstance(x, Tensor)]
        return locals_of(tensors) if self._sharded else tensors


def _same(objects: Collection[Any], others: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _equal(x: Any, number: Any) -> bool:
    """Return whether `x` has the same type and the same value as `number`."""
    return type(x) is type(number) and bool(x == number)


def impure(links: Sequence[Link]) -> list[str]:
    """Return the reasons why steps of a chain are never replayed. The list is usually empty.

    A class is pure only if the class body itself contains `pure = True`. The attribute is not
    inherited, because a subclass may do things that its base class does not.
    """
    return [
        f"{link.path}: {why}"
        for link in links
        for transform in link.transform.walk()
        for why in _impure(transform)
    ]


def _impure(transform: Description) -> list[str]:
    """Return why steps with this transform are never replayed. The list is usually empty.

    Either the class of the transform is not pure, or one of its fields is a function of the user
    that may not be pure.
    """
    kind = type(transform)
    if not vars(kind).get("pure", False):
        return [kind.impure or f"{kind.__name__} {UNSAID}"]
    reasons = list[str]()
    for name, value in vars(transform).items():
        known = name in kind.asks or getattr(value, "pure", False)
        ours = (getattr(value, "__module__", None) or "").partition(".")[0] == OURS
        if callable(value) and not (known or ours):
            reasons.append(
                f"the function {name} may depend on more than its arguments: if the result "
                f"depends only on the arguments, set `{name}.pure = True`"
            )
    return reasons


def subclassed(cohorts: Sequence[Cohort], states: States, place: GradPlace) -> str | None:
    """Return why the tensor types of a step prevent recording, or None if all tensors are plain."""
    params = [p for cohort in cohorts for p in cohort.originals]
    values = [x for state in states.values() for x in state.values()]
    tensors: dict[str, list[Any]] = {"parameters": params}
    tensors["state"] = [x for x in values if type(x) not in (int, float, bool)]
    tensors["gradients"] = list(map(place.of, params))
    if not all(map(operator.is_, locals_of(params), locals_of(params))):
        return "this version of PyTorch does not support recorded steps with sharded parameters"
    for what, row in tensors.items():
        here = locals_of(row)
        if not all_here(here):
            others = [x for x in here if type(x) not in REAL]
            kinds = ", ".join(sorted({type(x).__name__ for x in others}))
            if not all([isinstance(x, Tensor) for x in others]):
                return (
                    f"{what} contains values of type {kinds}: store only tensors and numbers in "
                    "optimizer.state[p]"
                )
            return f"{what} are tensor subclasses ({kinds}): use compile=False"
    return None
