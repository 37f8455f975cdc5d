"""Premises: what a tape takes for granted of parameters, gradients and state."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.part import Part
from torchzero_clip.core.tensors import all_plain
from torchzero_clip.engines.buffers import Buffer, apart

Groups = Sequence[Mapping[str, Any]]
States = Mapping[Tensor, Mapping[str, Any]]


class Premises:
    """The tensors of a step, by identity, address and form; they are compared before a repeat.

    Gradients are others in every step: of theirs the form and that they lie apart from the
    parameters is compared, and strides with those of `grads` where these are given.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        groups: Groups,
        states: States,
        grads: Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self._parts = list(parts)
        self._params = [Buffer(part.originals) for part in parts]
        self._names = [_names(part, states) for part in parts]
        self._held = Buffer(self._tensors(groups, states))
        self._others = _others(groups)
        self._bases: list[tuple[Tensor, int]] = []
        self._apart: list[Any] = [None] * len(parts)  # the gradients that are known to lie apart
        self._forms = None if grads is None else [Buffer(row).forms for row in grads]

    def knows(self, leaves: Sequence[Tensor]) -> bool:
        """Whether these are tensors of state or of parts, or those that some are views of."""
        vectors = [t for part in self._parts for t in part.vectors]
        known = {id(t) for t in [*self._held.tensors, *vectors]}
        bases = {id(t._base): t._base for t in self._held.tensors if t._base is not None}
        self._bases = [(base, base.data_ptr()) for base in bases.values()]
        return all([id(leaf) in known or id(leaf) in bases for leaf in leaves])

    def hold(self, parts: Sequence[Part], groups: Groups, states: States) -> bool:
        """Whether all is as it was."""
        return (
            len(parts) == len(self._parts)
            and all(map(operator.is_, parts, self._parts))
            and [_names(part, states) for part in parts] == self._names
            and self._held.same(self._tensors(groups, states))
            and _others(groups) == self._others
            and all([base.data_ptr() == address for base, address in self._bases])
        )

    def gradients(self, grads: Sequence[Sequence[Tensor]]) -> list[Buffer] | None:
        """The gradients as buffers; None where programs cannot take them."""
        if not all(map(all_plain, grads)):
            return None
        buffers = list(map(Buffer, grads))
        if self._forms is not None and [buffer.forms for buffer in buffers] != self._forms:
            return None
        for i, buffer in enumerate(buffers):
            where = buffer.addresses, buffer.forms
            if where != self._apart[i]:
                if not apart([self._params[i], buffer]):
                    return None
                self._apart[i] = where
        return buffers

    def _tensors(self, groups: Groups, states: States) -> list[Tensor]:
        """All parameters, and all tensors of state."""
        out: list[Tensor] = []
        for part in self._parts:
            out += part.originals
            for p in part.originals:
                out += states.get(p, {}).values()
        for group in groups:
            out += [x for x in group["chain"].values() if isinstance(x, Tensor)]
        return out


def _names(part: Part, states: States) -> list[list[str]]:
    return [list(states.get(p, ())) for p in part.originals]


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
