"""Replays: decide for each step whether to replay the recording, record the step, or run it.

`Compiled.step` passes every step to `Replays.step`, which does one of three things:

- Replay: a step has been recorded, and the new step meets the conditions of the recording. The
  recording runs as native calls, or as a Python function if it could not be compiled.
- Record: the new step is similar to the step before. The new step is recorded, and the recording is
  replayed at once.
- Run: in all other cases the new step runs through the links as usual.

`Replays.says` returns the lines about replays that `explain()` prints.
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
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import aligned_grads, local, locals_of
from torchzero_clip.core.step import Groups, Step
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

LONGEST_WAIT = 1000  # similar steps in a row that are required before another recording, at most
REPLAYS_WORTH_A_RECORDING = 16
NEXT_TWO = (
    "The two steps after {0} are not replayed, so that this run and a run that resumes from its "
    "checkpoint are bitwise identical. If these steps are too slow, call {0} less often."
)
LIKE = (
    "the parameters that have a gradient",
    "the types of hyperparameters",
    "the type of the loss",
    "the metrics",
)
"""The names of the parts of a step's signature. Two similar steps have equal signatures."""


StartRecording: TypeAlias = "Callable[[Sequence[Tensor]], AbstractContextManager[StepRecorder]]"
"""A function that receives the gradients of a step and returns a context that records it."""


class Replays:
    """The recorded step of an optimizer, and the decision when to record and when to replay.

    Two steps are similar if they have the same signature. This means that the same parameters have
    gradients, and that the kinds of hyperparameters, loss and measurements are equal. The second of
    two similar steps is recorded. If a recording is replayed only a few times, the next recording
    requires more similar steps in a row. It never requires more than `LONGEST_WAIT`.

    Args:
        links: The links of the chain.
        backend: The backend that runs programs: see `Runner.backend`.
        capture: The function that captures replayed steps in a CUDA graph. None if the user did not
            call `captured`.
        forgotten: The name of the call that dropped the previous recording, such as
            "state_dict()".

    Attributes:
        count: The number of times that the current recording was replayed.
        why: The reason why the last steps were not replayed. None if no reason is known.
    """

    def __init__(
        self,
        links: Sequence[Link],
        backend: str = "plain",
        capture: StepCapture | None = None,
        forgotten: str = "",
    ) -> None:
        self._links = links
        self._backend = backend
        self._capture = capture
        self._forgotten = forgotten
        self._impure = impure(links)
        self.count = 0
        self.why = "; ".join(self._impure) or None
        self._live = LiveValues([])
        self._signature: tuple[Any, ...] = ()  # of the last step that was not replayed
        self._similar = 0  # how many steps with this signature came in a row, the first not counted
        self._required = 1  # how many of them are required before a recording
        self._recorded: RecordedStep | None = None
        self._is_exception = False  # whether the last step alone ran without replay

    def step(self, step: Step, through: Through, recording: StartRecording) -> Records:
        """Replay, record, or run a step, and return the measurements of the links.

        Args:
            step: The step. It has not begun yet.
            through: A function that runs a step through the links.
            recording: A function that starts the recording of a step.
        """
        if step.kind is None or self._impure:
            return through(step)
        loss = self._loss_tensor(step)
        values = [*itertools.chain(*step.live[1]), step.loss if loss is None else None]
        if not self._live.same(values):
            self._live = LiveValues(values)
        if self._live.kinds is None:
            self.why = self._live.odd(list(step.live[0]))
            return through(step)
        kinds = self._live.kinds, loss is not None and (loss.dtype, loss.device), step.kind
        dropped = False
        recorded = self._recorded
        if recorded is not None:
            grads = recorded.match(step, kinds)
            if grads is not None and recorded.notes.answers_match(step.groups, about_counts=True):
                self.count += 1
                self._is_exception = False
                return recorded(step, grads, self._live.numbers)
            # if only an answer about a count differs, the next step may be replayed again
            self._is_exception = grads is not None and not self._is_exception
            dropped = not self._is_exception
            if dropped:
                self._drop()
        required = self._required
        if self._should_record(step, kinds, dropped):
            recorded = self._record(step, through, recording)
            if self._capture is not None and (recorded is None or recorded.compiled is None):
                raise RuntimeError(
                    "captured: this chain cannot be put into a CUDA graph: "
                    f"{self.why or 'it has too many operations'}. Remove the call "
                    "captured(optimizer)"
                )
            if recorded is not None and (grads := recorded.match(step, kinds)) is not None:
                self._recorded = recorded
                return recorded(step, grads, self._live.numbers)
        # hyperparameters are tensors, as in a recorded step, so that both give the same results
        arguments = self._live.substituted(step, self._live.tensors(self._gpu(step)))
        try:
            records = through(step.again(*arguments))
        except Exception:
            self._required = required  # the step itself failed, so later steps may be recorded
            raise
        return mapped(records, lambda t: t, step.groups)

    def _loss_tensor(self, step: Step) -> Tensor | None:
        """Return the loss of a step if the loss is a tensor on the device of the parameters.

        If the loss is a CPU tensor and parameters are on a GPU, the loss becomes a number. This
        number is sent to the GPU together with the hyperparameters, because a separate copy would
        synchronize.
        """
        loss = step.loss
        if not isinstance(loss, Tensor):
            return None
        first_params = [p for group in step.groups for p in group["params"][:1]]
        if loss.is_cpu and any([p.is_cuda for p in first_params]):
            step.loss = float(loss)
            return None
        return loss

    def _drop(self) -> None:
        """Drop the recording.

        If the recording had only a few replays, the next recording requires more similar steps.
        """
        self._recorded = None
        worth_it = self.count >= REPLAYS_WORTH_A_RECORDING
        self._required = 1 if worth_it else min(2 * self._required, LONGEST_WAIT)

    def _should_record(self, step: Step, kinds: tuple[Any, ...], dropped: bool) -> bool:
        """Return whether to record a step, and store the signature of the step.

        `dropped` tells whether the recording was dropped because of this step.
        """
        grads = [aligned_grads(group["params"], step.place) for group in step.groups]
        cohorts = [cohort for cohort, _ in step.roster.of(step.groups, grads)]
        before = self._signature
        self._signature = (cohorts, *kinds)
        if self._signature == before and not dropped:
            self._similar += 1
        else:
            self._similar = 0
            if before:
                self.why = difference(self._signature, before)
        if not cohorts or self._is_exception or self._similar < self._required:
            return False
        if why := subclassed(cohorts, step.states or {}, step.place):
            self.why = why
        return not why

    def says(self, besides: Sequence[str]) -> list[str]:
        """Return lines of text that explain whether steps are replayed: see `Engine.says`."""
        if never := [*besides, *self._impure]:
            return [
                "Steps are not recorded and replayed, for these reasons:",
                *[f"- {why}." for why in never],
            ]
        if self._recorded is None:
            if self.why:
                return [f"The last step was not replayed from a recording: {self.why}."]
            if self._forgotten:
                return [NEXT_TWO.format(self._forgotten)]
            return ["Steps of this chain can be recorded and replayed."]
        lines = [f"Steps are replayed from a recording, {self.count} so far."]
        compiled = self._recorded.compiled
        if compiled is None or not compiled.calls:
            return lines
        calls = counted(compiled.calls, "call")
        if not compiled.torch_calls:
            return [*lines, f"A replayed step is {calls} of compiled code."]
        counts = Counter(compiled.torch_calls).items()
        names = ", ".join([name if n == 1 else f"{name} ({n} times)" for name, n in counts])
        text = f"A replayed step is {calls} of compiled code. PyTorch runs the rest: {names}."
        return [*lines, text]

    def _gpu(self, step: Step) -> Tensor | None:
        """Return a parameter if all parameters are on one GPU, otherwise None.

        The hyperparameters are sent to the device of this parameter.
        """
        params = [p for group in step.groups for p in group["params"]]
        one_device = len({p.device for p in params}) == 1
        if self._live.numbers and one_device and on_gpu(params[0].device, self._backend):
            return local(params[0])
        return None

    def _record(
        self, step: Step, through: Through, recording: StartRecording
    ) -> RecordedStep | None:
        """Record a step without running it. Return None if the step cannot be replayed."""
        cohorts, *kinds = self._signature
        required = self._required  # restored if the step can be replayed
        self.count = 0
        self._similar = 0
        self._required = min(2 * self._required, LONGEST_WAIT)
        conditions = Conditions(cohorts, step.groups, step.states or {}, step.place)
        every_grad = [step.place.of(p) for cohort in cohorts for p in cohort.originals]
        grads = locals_of([grad for grad in every_grad if grad is not None])
        like = self._gpu(step)
        vector = None if like is None else self._live.vector(like)
        live = self._live.tensors() if vector is None else list(vector.unbind())
        changing = [*grads, step.loss] if isinstance(step.loss, Tensor) else [*grads]
        measured = list[Tensor]()
        try:
            if self._capture is not None and len({g.device for g in grads}) > 1:
                raise Later("the parameters are on several devices")
            with recording(grads) as recorder:
                notes = StepNotes(recorder)
                records = through(step.again(*self._live.substituted(step, live), notes))
                mapped(records, measured.append, ())  # collects their tensors in order
                measured = recorder.end(measured, live)
            function = python(recorder.graph)
            notes.close()
            others = [*changing, *live, *step.roster.vectors, *recorder.created]
            conditions.check_inputs(recorder.leaves, _fields(self._links), others)
            if recorder.takes_gradients:
                conditions.keep_layout()
        except Exception as error:  # an error of the step itself is raised again when it runs
            self.why = reason(error)
            self._required = required if isinstance(error, Later) else LONGEST_WAIT
            return None
        conditions.ignore([count.key for count in notes.counts])
        compiled = self._compiled(recorder, changing)
        counts = [len(cohort.originals) for cohort in cohorts]
        numbers = self._live.numbers
        inputs = StepInputs(
            recorder.leaves, changing, live, numbers, counts, recorder.gradients, vector
        )
        inputs.leave()
        memory = iter(measured)
        records = mapped(records, lambda _: next(memory), step.groups)
        self.why = None
        self._required = required
        self._forgotten = ""
        return RecordedStep(conditions, notes, tuple(kinds), function, compiled, inputs, records)

    def _compiled(self, recorder: StepRecorder, changing: Sequence[Tensor]) -> CompiledStep | None:
        """Compile a recorded step. Return None if it can only run as a Python function."""
        for kind, runs in ((DeviceStep, on_gpu), (NativeStep, on_cpu)):
            if runs(changing[0].device, self._backend):
                compiled = kind(recorder.graph, recorder.leaves, changing, recorder.gradients)
                compiled.capture = self._capture
                return compiled if compiled.calls else None
        return None


@dataclass(eq=False)
class RecordedStep:
    """A recorded step that can be replayed.

    Attributes:
        conditions: The tensors and values that must be unchanged for a replay.
        notes: The functions that the step called on the host, and their results.
        kinds: The kinds of the hyperparameters, the loss and the measurements.
        function: The step graph as a Python function of its inputs.
        compiled: The step as native calls, or None if it was not compiled.
        inputs: The inputs of the step graph.
        records: The measurements of the links. Every replay writes to the same tensors.
    """

    conditions: Conditions
    notes: StepNotes
    kinds: tuple[Any, ...]
    function: Callable[..., Any]
    compiled: CompiledStep | None
    inputs: StepInputs
    records: Records

    def match(self, step: Step, kinds: Any) -> list[Buffer] | None:
        """Return the gradients of a step if all conditions for a replay hold, otherwise None.

        This method does not call the recorded functions that receive a count of steps.
        """
        if kinds != self.kinds:
            return None
        grads = self.conditions.check(step.groups, step.states or {})
        if grads and self.notes.answers_match(step.groups, about_counts=False):
            return grads
        return None

    def __call__(self, step: Step, grads: Sequence[Buffer], numbers: Sequence[float]) -> Records:
        """Replay the recorded step with the gradients, hyperparameters and loss of `step`."""
        self.notes.count_on(step.groups)
        changing = self.inputs.enter(grads, numbers, step.loss)
        try:
            count = sum([len(buffer.tensors) for buffer in grads])
            if self.compiled is None or not self.compiled(changing, count):
                self.function(*self.inputs.leaves(changing))
        finally:
            self.inputs.leave()
        return dict(self.records)  # a new dict, so that a recorder can tell two steps apart


# ---------------------------------------------------------------------- why a step is not replayed


def difference(signature: Sequence[Any], before: Sequence[Any]) -> str:
    """Return a message that tells how the signature of a step differs from the step before."""
    changed = [part for part, x, y in zip(LIKE, signature, before, strict=True) if x != y]
    if not changed:
        return (
            "a gradient, a tensor of state or a value in a group was replaced by a new object: "
            "change the old object in place instead"
        )
    changes = " and ".join(changed)
    return f"{changes} changed between two steps: use the same values in every step"


def reason(error: Exception) -> str:
    """Return why a step could not be recorded, and the line of the rule that caused the error."""
    why = str(error)
    place = ""
    if not isinstance(error, (Refused, Later)):
        remedy = "the method update must not read values of tensors"
        why = f"{type(error).__name__}: {shorten(why, 120)}; {remedy}"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "").split(".")
        if module[0] != "torch" and (module[0] != OURS or "modules" in module):
            place = f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return why + place


def _fields(links: Sequence[Link]) -> list[Tensor]:
    """Return all tensors that are fields of transforms."""
    transforms = [transform for link in links for transform in link.transform.walk()]
    return [
        x for transform in transforms for x in vars(transform).values() if isinstance(x, Tensor)
    ]


# ---------------------------------------------------------------------- what links measured


def mapped(x: Any, function: Callable[[Tensor], Any], groups: Groups) -> Any:
    """Return a copy of records with every tensor t replaced by function(t), and with these groups.

    `function` is called with the tensors in their order in `x`.
    """
    if isinstance(x, dict):
        return {name: mapped(value, function, groups) for name, value in x.items()}
    if isinstance(x, UnitRecord):
        norm = mapped(x.norm, function, groups)
        limits = [mapped(limit, function, groups) for limit in x.limits]
        ratios = [mapped(ratio, function, groups) for ratio in x.ratios]
        return UnitRecord(norm, limits, ratios, x.division, groups)
    return function(x) if isinstance(x, Tensor) else x
