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
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from torchzero_clip.core.division import UnitRecord
from torchzero_clip.core.engine import Records, Through
from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import aligned_grads, local, locals_of
from torchzero_clip.core.step import Groups, Step
from torchzero_clip.core.torch_private import Missing
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.backends import on_cpu, on_gpu
from torchzero_clip.engines.compiled.replay.compiled_step import CompiledStep
from torchzero_clip.engines.compiled.replay.conditions import OURS, Conditions, impure, subclassed
from torchzero_clip.engines.compiled.replay.device_step import DeviceStep
from torchzero_clip.engines.compiled.replay.inputs import Later, LiveValues, StepInputs, StepNotes
from torchzero_clip.engines.compiled.replay.native_step import NativeStep
from torchzero_clip.engines.compiled.replay.step_recorder import Refused, python

if TYPE_CHECKING:
    from torchzero_clip.engines.compiled.replay.captures import StepCapture
    from torchzero_clip.engines.compiled.replay.step_recorder import StepRecorder

SELDOM = 1000  # steps alike before what could not be recorded is tried again
OFTEN = 16  # replays that make up for a recording
NEXT_TWO = (
    "The two steps after {} run without replay, so that this run and one that resumes from its "
    "checkpoint are bitwise identical: if step time matters, do not call it in every step."
)
LIKE = "parameters with a gradient", "kinds of live values", "kind of the loss", "measurements"
"""What two steps must have in common: see `Replays.step`."""


StartRecording: TypeAlias = "Callable[[Sequence[Tensor]], AbstractContextManager[StepRecorder]]"
"""It has a step with these gradients written down."""


class Replays:
    """The graph of an optimizer's steps.

    Args:
        links: The chain.
        backend: What compiles steps: see `Runner`.
        capture: What captures steps, where that is wanted.
        forgotten: What was called that has dropped the recorded step before, if anything was.

    Attributes:
        count: How often the graph was replayed.
        why: The reason why the last steps were not replayed, if one is known.
    """

    def __init__(
        self,
        links: Sequence[Link],
        backend: str = "plain",
        capture: StepCapture | None = None,
        forgotten: str = "",
    ) -> None:
        self._forgotten = forgotten
        self.count, self._links, self._backend, self._capture = 0, links, backend, capture
        self._never = impure(links)
        self.why = "; ".join(self._never) or None
        self._live = LiveValues([])
        self._like: tuple[Any, ...] = ()  # its cohorts, and the kinds of its values
        self._alike, self._wait = 0, 1  # steps that were like it, and how many it takes
        self._replay: RecordedStep | None = None
        self._rests = False  # whether the last step was another one among many replays

    def step(self, step: Step, through: Through, recording: StartRecording) -> Records:
        """Do a step again, or anew; returns what the links measured."""
        if step.kind is None:
            return through(step)
        loss, firsts = step.loss, [p for group in step.groups for p in group["params"][:1]]
        loss = loss if isinstance(loss, Tensor) else None
        if loss is not None and loss.is_cpu and any([p.is_cuda for p in firsts]):
            step.loss, loss = float(loss), None  # sent with the rates: a copy would wait
        flat = [*itertools.chain(*step.live[1]), step.loss if loss is None else None]
        if not self._live.same(flat):
            self._live = LiveValues(flat)
        if self._never or self._live.kinds is None:
            self.why = self.why if self._never else self._live.odd(list(step.live[0]))
            return through(step)
        kinds = self._live.kinds, loss is not None and (loss.dtype, loss.device), step.kind
        if (replay := self._replay) is not None:
            grads = replay.holds(step, kinds)
            if grads is not None and replay.notes.same(step.groups, counted=True):
                self.count, self._rests = self.count + 1, False
                return replay(step, grads, self._live.numbers)
            self._rests = grads is not None and not self._rests
            if not self._rests:
                self._replay = None
                self._wait = 1 if self.count >= OFTEN else min(2 * self._wait, SELDOM)
        if self._due(step, kinds, broken=replay is not self._replay):
            made = self._record(step, through, recording)
            if self._capture is not None and (made is None or made.native is None):
                raise RuntimeError(
                    "captured: a step of this chain cannot be captured: "
                    f"{self.why or 'it is too long'}; leave captured(...) out"
                )
            if made is not None and (grads := made.holds(step, kinds)) is not None:
                self._replay = made
                return made(step, grads, self._live.numbers)
        given = self._live.given(step, self._live.tensors(self._gpu(step)))
        records: Records = with_tensors(through(step.again(*given)), lambda t: t, step.groups)
        return records

    def _due(self, step: Step, kinds: tuple[Any, ...], broken: bool) -> bool:
        """Whether a step is to be written down; what it is like is noted."""
        grads = [aligned_grads(group["params"], step.place) for group in step.groups]
        cohorts, before = [cohort for cohort, _ in step.roster.of(step.groups, grads)], self._like
        self._like = (cohorts, *kinds)
        alike = self._like == before and not broken
        self._alike = self._alike + 1 if alike else 0
        if before and not alike:
            self.why = unlike(self._like, before)
        if not cohorts or self._rests or self._alike < self._wait:
            return False
        if why := subclassed(cohorts, step.states or {}, step.place):
            self.why = why
        return not why

    def says(self, besides: Sequence[str]) -> list[str]:
        """The way steps are done now, as far as it is known: see `Engine.says`."""
        if never := [*besides, *self._never]:
            return ["No step will be replayed:", *[f"- {why}." for why in never]]
        if self._replay is None:
            if self.why:
                return [f"The last step was done anew: {self.why}."]
            if self._forgotten:
                return [NEXT_TWO.format(self._forgotten)]
            return ["Nothing in the chain keeps its steps from being replayed."]
        done, native = f"Steps are replayed, {self.count} so far.", self._replay.native
        if native is None or not native.calls:
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
        return local(params[0]) if one and on_gpu(params[0].device, self._backend) else None

    def _record(
        self, step: Step, through: Through, recording: StartRecording
    ) -> RecordedStep | None:
        """Write down a step, which does not happen yet; None where it cannot be done again."""
        cohorts, *kinds = self._like
        self.count, again = 0, self._wait
        self._alike, self._wait = 0, min(2 * self._wait, SELDOM)  # unless it can be replayed
        conditions = Conditions(cohorts, step.groups, step.states or {}, step.place)
        found = [step.place.of(p) for cohort in cohorts for p in cohort.originals]
        grads = locals_of([grad for grad in found if grad is not None])
        like = self._gpu(step)
        vector = None if like is None else self._live.vector(like)
        live = self._live.tensors() if vector is None else list(vector.unbind())
        changing, measured = [*grads], list[Tensor]()
        changing += [step.loss] if isinstance(step.loss, Tensor) else []
        try:
            if self._capture is not None and len({g.device for g in grads}) > 1:
                raise Later("its parameters are on several devices")
            with recording(grads) as recorder:
                notes = StepNotes(recorder)
                records = through(step.again(*self._live.given(step, live), notes))
                with_tensors(records, measured.append, ())
                measured = recorder.end(measured, live)
            function = python(recorder.graph)
            notes.close()
            known = [*changing, *live, *_fields(self._links), *step.roster.vectors, *recorder.made]
            conditions.know(recorder.leaves, known)
            if recorder.takes_gradients:
                conditions.keep_layout()
        except Exception as error:  # a step that fails says so itself when it is done
            self.why = told(error)
            self._wait = again if isinstance(error, Later) else SELDOM
            return None
        conditions.leave_out([count.key for count in notes.counts])
        native = self._compiled(recorder, changing)
        counts = [len(cohort.originals) for cohort in cohorts]
        given = recorder.leaves, changing, live, self._live.numbers, counts, recorder.gradients
        inputs, each = StepInputs(*given, vector), iter(measured)
        inputs.leave()
        records = with_tensors(records, lambda _: next(each), step.groups)
        self.why, self._wait = None, again
        self._forgotten = ""
        return RecordedStep(conditions, notes, tuple(kinds), function, native, inputs, records)

    def _compiled(self, recorder: StepRecorder, changing: Sequence[Tensor]) -> CompiledStep | None:
        """A step that was written down as native calls; None where its graph is a function."""
        for kind, runs in ((DeviceStep, on_gpu), (NativeStep, on_cpu)):
            if runs(changing[0].device, self._backend):
                made = kind(recorder.graph, recorder.leaves, changing, recorder.gradients)
                made.capture = self._capture
                return made if made.calls else None
        return None


@dataclass(eq=False)
class RecordedStep:
    """A step that can be done again.

    Attributes:
        conditions, notes: What must be as it was, and what was asked on the host.
        kinds: Those of the live values and of the loss.
        function: The step as a function of its leaves.
        native: It as native calls, where it is compiled.
        inputs: What stands for each leaf.
        records: What the links measured, in memory that every step writes.
    """

    conditions: Conditions
    notes: StepNotes
    kinds: tuple[Any, ...]
    function: Callable[..., Any]
    native: CompiledStep | None
    inputs: StepInputs
    records: Records

    def holds(self, step: Step, kinds: Any) -> list[Buffer] | None:
        """The gradients where all is as it was when the step was written down; otherwise None."""
        if kinds != self.kinds:
            return None
        grads = self.conditions.hold(step.groups, step.states or {})
        return grads if grads and self.notes.same(step.groups, counted=False) else None

    def __call__(self, step: Step, grads: Sequence[Buffer], numbers: Sequence[float]) -> Records:
        self.notes.count_on(step.groups)
        changing = self.inputs.enter(grads, numbers, step.loss)
        try:
            count = sum([len(buffer.tensors) for buffer in grads])
            if self.native is None or not self.native(changing, count):
                self.function(*self.inputs.leaves(changing))
        finally:
            self.inputs.leave()
        return dict(self.records)  # another one: whoever looks at each step tells them apart


# ---------------------------------------------------------------------- what may be replayed


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
        module = frame.f_globals.get("__name__", "").split(".")
        if module[0] != "torch" and (module[0] != OURS or "modules" in module):
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return why + place


# ---------------------------------------------------------------------- what a step is made of


def _fields(links: Sequence[Link]) -> list[Tensor]:
    """The tensors among the fields of the transforms."""
    inside = [one for link in links for one in link.transform.walk()]
    return [x for one in inside for x in vars(one).values() if isinstance(x, Tensor)]


# ---------------------------------------------------------------------- what links measured


def with_tensors(x: Any, other: Callable[[Tensor], Any], groups: Groups) -> Any:
    """The same records with `other` of each tensor, called in order, and of these groups."""
    if isinstance(x, dict):
        return {name: with_tensors(value, other, groups) for name, value in x.items()}
    if isinstance(x, UnitRecord):
        vectors = [x.norm], x.limits, x.ratios
        rows = [[with_tensors(one, other, groups) for one in row] for row in vectors]
        return UnitRecord(rows[0][0], rows[1], rows[2], x.division, groups)
    return other(x) if isinstance(x, Tensor) else x
