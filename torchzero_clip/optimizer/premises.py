"""Premises: what a tape takes for granted of parameters, gradients and state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.part import Part
from torchzero_clip.core.tensors import LAYOUT, SHAPE
from torchzero_clip.engines.buffers import Buffer, apart

Groups = Sequence[Mapping[str, Any]]
States = Mapping[Tensor, Mapping[str, Any]]


class Premises:
    """The tensors of a step, by identity, address and form; they are compared before a repeat.

    Gradients are others in every step: of theirs the form and that they lie apart from the
    parameters is compared, and strides where `strided` says so.
    """

    def __init__(
        self, parts: Sequence[Part], groups: Groups, states: States, strided: bool
    ) -> None:
        self._parts, self._strided = list(parts), strided
        self._rows = [list(group["params"]) for group in groups]
        self._named = [group.get("param_names") for group in groups]
        self._shapes = [list(part.shapes) for part in parts]
        self._params = [Buffer(part.originals) for part in parts]
        grads = [[p.grad for p in row] for row in self._rows]
        self._kinds = [list(map(type, row)) for row in grads]
        self._forms = [Buffer(part.of(grads[part.index])).forms for part in parts]
        names, tensors = self._state(groups, states)
        self._names, self._held = names, Buffer(tensors)
        self._others = _others(groups)
        self._bases: list[tuple[Tensor, int]] = []
        self._apart: list[Any] = [None] * len(parts)  # the gradients that are known to lie apart

    def knows(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these are tensors of state or of parts, or those that some are views of."""
        vectors = [t for part in self._parts for t in part.vectors]
        known = {id(t) for t in [*self._held.tensors, *vectors]}
        bases = {id(t._base): t._base for t in self._held.tensors if t._base is not None}
        self._bases = [(base, base.data_ptr()) for base in bases.values()]
        return all([id(leaf) in known or id(leaf) in bases for leaf in leaves])

    def hold(self, groups: Groups, states: States) -> list[Buffer] | None:
        """The gradients as buffers where all is as it was; otherwise None."""
        rows = [group["params"] for group in groups]
        if list(map(len, rows)) != list(map(len, self._rows)):
            return None
        grads = [[p.grad for p in row] for row in rows]
        same = all([all(map(operator.is_, *both)) for both in zip(rows, self._rows, strict=True)])
        if not same or [list(map(type, row)) for row in grads] != self._kinds:
            return None
        if [group.get("param_names") for group in groups] != self._named:
            return None
        names, tensors = self._state(groups, states)
        if names != self._names or not self._held.same(tensors) or _others(groups) != self._others:
            return None
        if not all([base.data_ptr() == address for base, address in self._bases]):
            return None
        return self._gradients([part.of(grads[part.index]) for part in self._parts])

    def _gradients(self, grads: Sequence[Sequence[Tensor]]) -> list[Buffer] | None:
        """The gradients as buffers where they have the form that they had."""
        if not all([{torch.strided}.issuperset(map(LAYOUT, row)) for row in grads]):
            return None
        buffers = list(map(Buffer, grads))
        for i, (buffer, params) in enumerate(zip(buffers, self._params, strict=True)):
            forms, shapes = self._forms[i], self._shapes[i]
            like = buffer.forms == forms if self._strided else buffer.forms[0] == forms[0]
            for row in (params.tensors, buffer.tensors):
                like = like and all(map(operator.eq, map(SHAPE, row), shapes))
            where = buffer.addresses, buffer.forms
            if not like or (where != self._apart[i] and not apart([params, buffer])):
                return None
            self._apart[i] = where
        return buffers

    def _state(self, groups: Groups, states: States) -> tuple[list[str], list[Tensor]]:
        """The names in the state of all parameters, and all tensors: theirs and of state."""
        names: list[str] = []
        tensors: list[Tensor] = []
        for part in self._parts:
            tensors += part.originals
            for p in part.originals:
                held = states.get(p, {})
                names += held
                names.append("")  # the end
                tensors += held.values()
        for group in groups:
            tensors += [x for x in group["chain"].values() if isinstance(x, Tensor)]
        return names, tensors


def _others(groups: Groups) -> list[Any]:
    """The names in the chain dicts of groups, and the values that are no tensors."""
    return [
        (key, None if isinstance(x, Tensor) else repr(x))
        for group in groups
        for key, x in group["chain"].items()
    ]


def alike(parts: Sequence[Part], states: States) -> bool:
    """Whether all parameters of each part have the same names in their state, all of tensors."""
    held = [[states.get(p, {}) for p in part.originals] for part in parts]
    return all(
        [
            state.keys() == row[0].keys() and all([isinstance(x, Tensor) for x in state.values()])
            for row in held
            for state in row
        ]
    )
