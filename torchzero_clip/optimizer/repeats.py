"""Repeats: a step that is like the one before is done again from a tape of it.

What the tape takes for granted is looked at before each repeat: which parameters have gradients,
the kinds of live values, and the identity, address and form of all tensors of state. Another step
runs anew, and is recorded where a second one like it comes.

A link may be repeated where its Python code sees nothing but lists, vectors and live values: one of
ours that leaves `step` as it is.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.link import Link
from torchzero_clip.core.norm_rule import NormRule
from torchzero_clip.core.part import Part, Roster
from torchzero_clip.core.tensors import all_plain
from torchzero_clip.core.transform import TensorwiseTransform, Transform
from torchzero_clip.core.units import UnitRecord
from torchzero_clip.engines import Compiled, Eager
from torchzero_clip.engines.noted import Noted
from torchzero_clip.engines.repeated import Repeated
from torchzero_clip.engines.tape import Tape
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer.premises import Premises, alike

OURS = __name__.partition(".")[0]
SELDOM = 1000  # steps alike before what could not be recorded is tried again
OFTEN = 16  # repeats that make up for a recording
FIXED = (int, bool, float, str, type(None))

Groups = Sequence[dict[str, Any]]
States = Mapping[Tensor, dict[str, Any]]
Records = dict[str, Any]
Anew = Callable[[Groups], Records]


class Repeats:
    """The tape of an optimizer's steps.

    Args:
        links: The chain.
        keys: The keys of its live values.
        engine: The engine that runs it, which says what it repeats.
    """

    def __init__(self, links: Sequence[Link], keys: GroupKeys, engine: Eager | Compiled) -> None:
        narrow = any([link.narrow for link in keys.links]) and not engine.steady
        self.possible = not narrow and all([repeatable(link.transform) for link in links])
        self.count = 0  # repeats of the tape
        self._engine, self._free = engine, _free(links, keys)
        self._values = Values([], [])
        self._like: Any = None  # the parts of the last step, and the kinds of its live values
        self._alike, self._wait = 0, 1  # steps that were like it, and how many it takes
        self._tape: tuple[Premises, Any, Repeated, Records] | None = None

    def step(
        self,
        groups: Groups,
        states: States,
        values: Sequence[Sequence[Any]],
        roster: Roster,
        anew: Anew,
    ) -> Records:
        """Do a step again, or `anew`; returns what the links measured.

        `values` are the live values of each group, in the order of the keys.
        """
        flat = list(itertools.chain(*values))
        if not self._values.same(flat):
            self._values = Values(flat, list(self._free.values()) * len(groups))
        kinds, broken = self._values.kinds, self._tape is not None
        if self._tape is not None:
            premises, known, repeated, records = self._tape
            grads = premises.hold(groups, states) if kinds == known else None
            if grads is not None and repeated.holds(self._values.numbers):
                self.count += 1
                measured = iter(repeated(grads))
                return {path: _filled(x, measured, groups) for path, x in records.items()}
            self._tape = None
            self._wait = 1 if self.count >= OFTEN else min(2 * self._wait, SELDOM)
        parts = _parts(groups, roster)
        self._alike = self._alike + 1 if (parts, kinds) == self._like and not broken else 0
        self._like = parts, kinds
        able = parts and kinds is not None and all(map(_able, parts))
        if not able or self._alike < self._wait or not alike(parts, states):
            return anew(groups)
        if sum([sum(part.sizes) for part in parts]) > self._engine.repeats:
            self._wait = SELDOM
            return anew(groups)
        return self._record(parts, groups, states, anew)

    def _record(
        self,
        parts: Sequence[Part],
        groups: Groups,
        states: States,
        anew: Callable[[Groups], Records],
    ) -> Records:
        """A step anew, from which later ones may be repeated."""
        engine, names = self._engine, map("live[{}]".format, itertools.count())
        premises = Premises(parts, groups, states, strided=not engine.steady)
        tape = Tape(engine.steady)
        engine.tape = tape
        try:
            with tape:
                records = anew([{**g, **self._named(g, names, tape)} for g in groups])
        finally:
            engine.tape = None
        self.count, again = 0, self._wait
        self._alike, self._wait = 0, min(2 * self._wait, SELDOM)  # unless it can be repeated
        records = {path: _filled(x, iter(_tensors(x)), groups) for path, x in records.items()}
        if tape.refused is not None or not premises.knows(tape.leaves):
            self._wait = SELDOM
        elif premises.hold(groups, states) is not None:  # now as before the step
            repeated = tape.function([t for x in records.values() for t in _tensors(x)])
            empty = {path: _filled(x, itertools.repeat(None), ()) for path, x in records.items()}
            if repeated is not None:
                self._tape = premises, self._values.kinds, repeated, empty
                self._wait = again
        tape.close()
        return records

    def _named(self, group: Mapping[str, Any], names: Any, tape: Tape) -> dict[str, Any]:
        """The live values of a group that may change, as numbers that a tape knows."""
        free = {key: group[key] for key, free in self._free.items() if free}
        return {
            key: tuple([Noted(x, next(names), tape) for x in value])
            if type(value) is tuple
            else Noted(value, next(names), tape)
            for key, value in free.items()
            if _numeric(value)
        }


class Values:
    """The live values of a step.

    Attributes:
        numbers: Those that a tape takes afresh.
        kinds: What must stay as it is for a tape; None where there are tensors and the like.
    """

    def __init__(self, values: Sequence[Any], free: Sequence[bool]) -> None:
        self._values = values
        self.numbers: list[float] = []
        self.kinds: list[Any] | None = []
        for value, may_change in zip(values, free, strict=True):
            each = value if type(value) is tuple else (value,)
            if may_change and _numeric(value):
                self.numbers += each
                self.kinds.append((type(value), len(each)))
            elif all([type(x) in FIXED for x in each]):
                self.kinds.append((type(value), repr(value)))
            else:
                self.kinds = None
                break

    def same(self, values: Sequence[Any]) -> bool:
        """Whether these are the same objects."""
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))


def _numeric(value: Any) -> bool:
    """Whether a live value is a float, or a tuple of them."""
    return type(value) is float or (
        type(value) is tuple and bool(value) and all([type(x) is float for x in value])
    )


def repeatable(tfm: Any) -> bool:
    """Whether the code of a transform does the same in every step: ours, no function of a user."""
    inside = list(tfm.walk())
    given = [value for one in inside for value in vars(one).values() if callable(value)]
    known = [getattr(x, "__module__", None) or "" for x in [*map(type, inside), *given]]
    return (
        type(tfm).step in (Transform.step, NormRule.step)
        and not isinstance(tfm, TensorwiseTransform)
        and all([name.partition(".")[0] == OURS for name in known])
    )


def _free(links: Sequence[Link], keys: GroupKeys) -> dict[str, bool]:
    """For each key whether it may change: `update` alone sees it, as a tensor."""
    plain = [link for link in links if type(link.transform).step is Transform.step]
    others = [link for link in keys.links if link not in plain]
    fixed = {key for link in others for key in link.keys.values()}
    fixed |= {owner.keys[name] for link in others for name, owner in link.read.items()}
    return {key: key not in fixed for key in keys.defaults}


def _parts(groups: Groups, roster: Roster) -> list[Part]:
    """The parts of the parameters with a gradient."""
    roster.forget(len(groups))
    parts: list[Part] = []
    for index, group in enumerate(groups):
        parts += roster.parts(index, group, [p.grad for p in group["params"]])
    return parts


def _able(part: Part) -> bool:
    on_cpu = part.plain and part.device.type == "cpu"
    return on_cpu and all_plain([p.grad for p in part.originals if p.grad is not None])


def _tensors(record: Any) -> list[Tensor]:
    """The tensors of what a norm rule measured, in order, or the one that is all."""
    if isinstance(record, Tensor):
        return [record]
    return [x for x in (record.norm, *record.limits, *record.ratios) if isinstance(x, Tensor)]


def _filled(record: Any, tensors: Any, groups: Groups) -> Any:
    """The same record with other tensors, in order, and of these groups."""
    if not isinstance(record, UnitRecord):
        return next(tensors)

    def other(x: Any) -> Any:
        return next(tensors) if x is None or isinstance(x, Tensor) else x

    rows = other(record.norm), list(map(other, record.limits)), list(map(other, record.ratios))
    return UnitRecord(*rows, record.division, groups)
