"""Replays: a step that is like one before is done again from its graph, without a link or a list.

What the graph takes for granted is looked at before: which parameters have gradients, the kinds of
live values, the answers of functions of a user, and the identity, address and form of all tensors
of state. Another step runs anew, and is recorded where a second one like it comes.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.division import UnitRecord
from torchzero_clip.core.engine import Records, Through
from torchzero_clip.core.link import Link
from torchzero_clip.core.part import Part
from torchzero_clip.core.private import Missing
from torchzero_clip.core.step import Step
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.again.device_step import DeviceStep
from torchzero_clip.engines.compiled.again.inputs import Later, LiveValues, StepInputs, StepNotes
from torchzero_clip.engines.compiled.again.native_step import NativeStep
from torchzero_clip.engines.compiled.again.premises import OURS, Premises, impure, subclassed
from torchzero_clip.engines.compiled.again.recorder import Refused, python
from torchzero_clip.engines.compiled.again.steps import CompiledStep
from torchzero_clip.engines.compiled.printers.backends import on_gpu

if TYPE_CHECKING:
    from torchzero_clip.engines.compiled.again.graphs import StepGraph
    from torchzero_clip.engines.compiled.again.recorder import StepRecorder

SELDOM = 1000  # steps alike before what could not be recorded is tried again
OFTEN = 16  # replays that make up for a recording
LIKE = "parameters with a gradient", "kinds of live values", "kind of the loss", "measurements"
"""What two steps must have in common: see `Replays.step`."""


StartRecording: TypeAlias = "Callable[[Sequence[Tensor]], AbstractContextManager[StepRecorder]]"
"""It has a step with these gradients written down."""


class Replays:
    """The graph of an optimizer's steps.

    Args:
        links: The chain.
        backend: What compiles steps: see `Runner`.
        graph: That of a step, where these are captured.

    Attributes:
        count: How often the graph was replayed.
        why: The reason why the last steps were not replayed, if one is known.
    """

    def __init__(
        self, links: Sequence[Link], backend: str = "plain", graph: StepGraph | None = None
    ) -> None:
        self.count, self._links, self._backend, self._graph = 0, links, backend, graph
        self._never = impure(links)
        self.why = "; ".join(self._never) or None
        self._live = LiveValues([])
        self._like: tuple[Any, ...] = ()  # the parts of the last step, and the kinds of its values
        self._alike, self._wait = 0, 1  # steps that were like it, and how many it takes
        self._replay: RecordedStep | None = None
        self._rested = False  # whether the last step was another one among many replays

    def step(self, step: Step, through: Through, recording: StartRecording) -> Records:
        """Do a step again, or anew; returns what the links measured."""
        if step.kind is None:
            return through(step)
        if isinstance(step.loss, Tensor) and step.loss.is_cpu:
            _bring_loss(step, step.loss)
        loss = step.loss if isinstance(step.loss, Tensor) else None
        flat = [*itertools.chain(*step.live[1]), step.loss if loss is None else None]
        if not self._live.same(flat):
            self._live = LiveValues(flat)
        if self._never or self._live.kinds is None:
            self.why = self.why if self._never else self._live.odd(list(step.live[0]))
            return through(step)
        kinds = self._live.kinds, loss is not None and (loss.dtype, loss.device), step.kind
        broken = rests = False
        if self._replay is not None:
            grads = self._replay.holds(step, kinds)
            if grads is not None and self._replay.notes.same(step.groups, counted=True):
                self.count, self._rested = self.count + 1, False
                return self._replay(step, grads, self._live.numbers)
            rests = grads is not None and not self._rested  # a step among many
            if not rests:
                self._replay, broken = None, True
                self._wait = 1 if self.count >= OFTEN else min(2 * self._wait, SELDOM)
        self._rested = rests
        parts, before = _parts(step), self._like
        self._like = (parts, *kinds)
        alike = self._like == before and not broken
        self._alike = self._alike + 1 if alike else 0
        if before and not alike:
            self.why = unlike(self._like, before)
        able = bool(parts) and self._alike >= self._wait and not rests
        if able and (why := subclassed(parts, step.states or {})):
            self.why, able = why, False
        if able:
            self._record(parts, kinds, step, through, recording)
            if self._graph is not None and (self._replay is None or not self._replay.native):
                raise RuntimeError(
                    "captured: a step of this chain cannot be captured: "
                    f"{self.why or 'it is too long'}; leave captured(...) out"
                )
            if self._replay is not None and (grads := self._replay.holds(step, kinds)) is not None:
                return self._replay(step, grads, self._live.numbers)
            self._replay = None
        given = self._live.given(step, self._live.tensors(self._gpu(step)))
        records = through(step.again(*given))
        return _of_groups(records, measured_in(records), step.groups)

    def says(self, besides: Sequence[str]) -> list[str]:
        """The way steps are done now, as far as it is known: see `Engine.says`."""
        if never := [*besides, *self._never]:
            return ["No step will be replayed:", *[f"- {why}." for why in never]]
        if self._replay is None:
            none = "Nothing in the chain keeps its steps from being replayed."
            return [f"The last step was done anew: {self.why}." if self.why else none]
        done, native = f"Steps are replayed, {self.count} so far.", self._replay.native
        if native is None:
            return [done]
        calls = "one native call" if native.calls == 1 else f"{native.calls} native calls"
        if not native.lacking:
            return [done, f"A step is {calls}."]
        counts = Counter(native.lacking).items()
        names = ", ".join([name if n == 1 else f"{name} ({n} times)" for name, n in counts])
        return [done, f"A step is {calls}; torch does between them: {names}."]

    def _gpu(self, step: Step) -> Tensor | None:
        """A parameter, where all are on one GPU: numbers of steps are there then as well."""
        params = [p for group in step.groups for p in group["params"]]
        one = len({p.device for p in params}) == 1 and bool(self._live.numbers)
        return params[0] if one and on_gpu(params[0].device, self._backend) else None

    def _record(
        self,
        parts: Sequence[Part],
        kinds: Any,
        step: Step,
        through: Through,
        recording: StartRecording,
    ) -> None:
        """Write down a step, which does not happen yet."""
        self.count, again = 0, self._wait
        self._alike, self._wait = 0, min(2 * self._wait, SELDOM)  # unless it can be replayed
        premises = Premises(parts, step.groups, step.states or {})
        grads = [p.grad for part in parts for p in part.originals if p.grad is not None]
        if self._graph is not None and len({g.device for g in grads}) > 1:
            self.why = "its parameters are on several devices"
            return
        like = self._gpu(step)
        vector = None if like is None else self._live.vector(like)
        live = self._live.tensors() if vector is None else list(vector.unbind())
        try:
            with recording(grads) as recorder:
                notes = StepNotes(recorder)
                records = through(step.again(*self._live.given(step, live), notes))
                kept = recorder.end(measured_in(records), live)
            function = python(recorder.graph)
            notes.close()
        except Exception as error:  # a step that fails says so itself when it is done
            self.why = told(error)
            self._wait = again if isinstance(error, Later) else SELDOM
            return
        changing = [*grads, *([step.loss] if isinstance(step.loss, Tensor) else [])]
        known = [*changing, *live, *_fields(self._links), *step.roster.vectors]
        if (why := premises.unknown(recorder.leaves, [*known, *recorder.made])) is not None:
            self.why, self._wait = why, SELDOM
            return
        premises.leave_out([count.key for count in notes.counts])
        counts = [sum([p.grad is not None for p in part.originals]) for part in parts]
        gradients, leaves = recorder.gradients, recorder.leaves
        compiled = _kind_of(self._backend, grads[0].device)
        native = compiled(recorder.graph, leaves, changing, gradients) if compiled else None
        native = native if native is not None and native.works else None
        if native is not None:
            native.graph = self._graph
        inputs = StepInputs(leaves, changing, live, self._live.numbers, counts, gradients, vector)
        inputs.leave()
        records, functions = _of_groups(records, kept, step.groups), (function, native)
        self._replay = RecordedStep(premises, notes, kinds, functions, inputs, records)
        self.why, self._wait = None, again


class RecordedStep:
    """A step that can be done again.

    Args:
        premises, notes: What must be as it was, and what was asked on the host.
        kinds: Those of the live values and of the loss.
        function: The step, of its leaves, and as native calls where it is compiled.
        inputs: What stands in the place of each leaf.
        records: What the links measured, in memory that every step writes.
    """

    def __init__(
        self,
        premises: Premises,
        notes: StepNotes,
        kinds: Any,
        function: tuple[Callable[..., Any], CompiledStep | None],
        inputs: StepInputs,
        records: Records,
    ) -> None:
        self._premises, self.notes, self._kinds = premises, notes, kinds
        self._inputs, self._records = inputs, records
        self._function, self.native = function

    def holds(self, step: Step, kinds: Any) -> list[Buffer] | None:
        """The gradients where all is as it was when the step was written down; otherwise None."""
        if kinds != self._kinds:
            return None
        grads = self._premises.hold(step.groups, step.states or {})
        return grads if grads and self.notes.same(step.groups, counted=False) else None

    def __call__(self, step: Step, grads: Sequence[Buffer], numbers: Sequence[float]) -> Records:
        self.notes.count_on(step.groups)
        changing = self._inputs.enter(grads, numbers, step.loss)
        try:
            if self.native is None or not self.native(changing):
                self._function(*self._inputs.leaves(changing))
        finally:
            self._inputs.leave()
        return dict(self._records)  # another one: whoever looks at each step tells them apart


# ---------------------------------------------------------------------- what may be replayed


def _kind_of(name: str, device: torch.device) -> type[CompiledStep] | None:
    """What does a step again that was written down; None for its graph as a function."""
    if on_gpu(device, name):
        return DeviceStep
    return NativeStep if name == "native" and device.type == "cpu" else None


def unlike(step: Sequence[Any], before: Sequence[Any]) -> str:
    """What is another than in the step before."""
    changed = [what for what, x, y in zip(LIKE, step, before, strict=True) if x != y]
    if not changed:
        return "a tensor or number of state, groups or gradients was replaced: write it in place"
    return f"{' and '.join(changed)} differ from the step before: have the same in each"


def told(error: Exception) -> str:
    """The reason why a step could not be written down, and the line of a rule that it is about."""
    why, place = str(error), ""
    if not isinstance(error, (Refused, Later, Missing)):
        why = f"{type(error).__name__}: {shorten(why, 120)}; a pure rule works without values"
    for frame, line in traceback.walk_tb(error.__traceback__):
        room = frame.f_globals.get("__name__", "").split(".")
        if room[0] != "torch" and (room[0] != OURS or "modules" in room):
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return why + place


# ---------------------------------------------------------------------- what a step is made of


def _fields(links: Sequence[Link]) -> list[Tensor]:
    """The tensors among the fields of the transforms."""
    inside = [one for link in links for one in link.transform.walk()]
    return [x for one in inside for x in vars(one).values() if isinstance(x, Tensor)]


def _parts(step: Step) -> list[Part]:
    """The parts of the parameters with a gradient."""
    grads = [[p.grad for p in group["params"]] for group in step.groups]
    return [part for part, _ in step.roster.of(step.groups, grads)]


def _bring_loss(step: Step, loss: Tensor) -> None:
    """Make a loss that lies on the host a number, where parameters are on a GPU.

    It is sent with the rates: a copy would wait for the device, and a graph would keep its address.
    """
    if any([p.is_cuda for group in step.groups for p in group["params"][:1]]):
        step.loss = float(loss)


# ---------------------------------------------------------------------- what links measured


def measured_in(records: Records) -> list[Tensor]:
    """The tensors of what links measured, in order."""
    return [x for record in records.values() for x in _each(record) if isinstance(x, Tensor)]


def _each(record: Any) -> list[Any]:
    if isinstance(record, UnitRecord):
        return [record.norm, *record.limits, *record.ratios]
    return list(record.values()) if isinstance(record, dict) else [record]


def _of_groups(
    records: Records, tensors: Sequence[Tensor], groups: Sequence[dict[str, Any]]
) -> Records:
    """The same records with other tensors, in order, and of these groups."""
    each = iter(tensors)

    def other(x: Any) -> Any:
        return next(each) if isinstance(x, Tensor) else x

    def of_one(record: Any) -> Any:
        if isinstance(record, dict):
            return {name: other(x) for name, x in record.items()}
        if not isinstance(record, UnitRecord):
            return other(record)
        rows = [list(map(other, row)) for row in ([record.norm], record.limits, record.ratios)]
        return UnitRecord(rows[0][0], rows[1], rows[2], record.division, groups)

    return {path: of_one(record) for path, record in records.items()}
