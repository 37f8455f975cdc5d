"""Compiled: the engine that records a step, and runs it in as few passes over memory as it can."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchzero_clip.core import engine, norms
from torchzero_clip.core.engine import Cover, Formula, Group, Records, Rule, State, Through, updated
from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.link import Link
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensor_kinds import all_here
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.engines.buffers import apart
from torchzero_clip.engines.compiled.lists.memory import GRADIENTS, PARAMETERS, WIDE
from torchzero_clip.engines.compiled.lists.runner import Runner
from torchzero_clip.engines.compiled.lists.storage_formats import move, rounded
from torchzero_clip.engines.compiled.lists.tape import BucketTape, Taped
from torchzero_clip.engines.compiled.printers.backends import missing, node_by_node, on_gpu
from torchzero_clip.engines.compiled.printers.launches import KernelError
from torchzero_clip.engines.compiled.replay.captures import StepCapture
from torchzero_clip.engines.compiled.replay.conditions import impure
from torchzero_clip.engines.compiled.replay.replays import Replays
from torchzero_clip.engines.compiled.replay.step_recorder import Refused, StepRecorder
from torchzero_clip.engines.eager import Eager
from torchzero_clip.engines.kept import Kept


class Compiled(Runner):
    """The engine that records operators, and runs them in compiled programs.

    Args:
        links: The chain whose steps it does.
    """

    fuses = False

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__()
        self.links = links
        self.replays: Replays | None = None
        self.forgotten = ""  # what was called that has dropped the recorded step
        self.captures: StepCapture | None = None  # where steps are captured
        self.devices: set[str] = set()  # kinds that programs can be compiled for
        self.eager = Eager(reads=False)  # for tensors that no program takes

    def check(self, device: torch.device) -> None:
        """Raise a sentence where nothing can compile for this kind of device."""
        if device.type in self.devices:
            return
        if (why := missing(device.type)) is not None:
            raise RuntimeError(f"compile=True {why}; leave compile out to step without it")
        if (why := node_by_node(device.type)) is not None:
            warn(f"compile=True {why}")
        self.devices.add(device.type)

    def __repr__(self) -> str:
        return "Compiled()"

    def twin(self, watch: Cover | None = None) -> Compiled:
        """An engine that does the same with memory of its own, and compiles nothing."""
        made = Compiled(self.links)
        made.backend, made.watch = "plain", watch
        return made

    def lasting(self) -> list[Tensor]:
        return self.workspaces.tensors() + self.eager.lasting()

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> engine.Session:
        """A session that records; an eager one for complex tensors, subclasses and shared memory.

        Tensors that share memory must be worked on one after the other.
        """
        odd = torch.compiler.is_compiling() or params[0].is_complex()
        if not odd and all_here([*params, *grads]):
            self.check(params[0].device)
            tape = BucketTape(self, key, places, params, grads, WeakKeyDictionary())
            if apart([tape.buffers[PARAMETERS], tape.buffers[GRADIENTS]]):
                return CompiledSession(tape)
        self._refuse("tensors are complex or share memory: give view_as_real of them, or clones")
        return self.eager.open(key, places, params, grads)

    def in_turn(self) -> engine.Engine:
        self._refuse("gradients share memory: give each its own, as p.grad.clone() has")
        return self.eager

    def step(self, step: Step, through: Through) -> Records:
        if self.replays is None:
            self.replays = Replays(self.links, self.backend, self.captures, self.forgotten)
        try:
            return self.replays.step(step, through, self._recording)
        except KernelError as error:
            chain = ", ".join([repr(link.transform) for link in self.links])
            raise RuntimeError(
                f"compile=True: Triton could not compile a kernel of the chain {chain} ({error}); "
                "leave compile out to step without it, or install the version of Triton that this "
                f"torch wants: torch {torch.__version__} names it among its requirements"
            ) from error

    def forget(self, why: str) -> None:
        self.replays = None
        self.forgotten = why

    def phase(self) -> Callable[[], None]:
        before = copy.copy(self.replays)

        def again() -> None:
            self.replays = copy.copy(before)

        return again

    def capture(self, devices: set[torch.device]) -> None:
        """Have steps captured; raises a sentence where they cannot be."""
        if len(devices) > 1 or not all([on_gpu(device, self.backend) for device in devices]):
            where = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"captured takes parameters on one GPU, with Triton, got {where}")
        if why := "; ".join(impure(self.links)):
            raise ValueError(f"captured: the steps of this chain differ on the host: {why}")
        self.captures, self.replays = StepCapture(), None

    def _refuse(self, why: str) -> None:
        if self.recorder is not None:
            raise Refused(why)

    def says(self, besides: Sequence[str]) -> list[str]:
        return (self.replays or Replays(self.links, forgotten=self.forgotten)).says(besides)

    @contextmanager
    def _recording(self, grads: Sequence[Tensor]) -> Iterator[StepRecorder]:
        """What happens inside is written down."""
        self.recorder = recorder = StepRecorder(grads)
        try:
            with recorder:
                yield recorder
        finally:
            self.recorder = None
            recorder.close()


FLOAT32 = ("dtype", str(torch.float32))


class CompiledSession:
    """The tensors of one bucket during one step, on one tape."""

    def __init__(self, tape: BucketTape) -> None:
        self._tape = tape
        self.params: TensorList = Taped(tape, buffer=PARAMETERS, owned=False)
        self.grads: TensorList = Taped(tape, buffer=GRADIENTS, owned=False)
        self._form: Nearest | None = None  # that the parameters are kept in
        self._kept_state: dict[str, tuple[TensorList, TensorList, Stochastic]] = {}  # until settled

    @property
    def skip(self) -> Skip:
        return self._tape.skip

    @skip.setter
    def skip(self, skip: Skip) -> None:
        self._tape.skip = skip

    def adopt(self, u: TensorList) -> TensorList:
        if isinstance(u, Taped) and u.on(self._tape):
            return u
        made = self._tape.record(u.tensors, owned=u.owned)
        made.measure = u.measure
        return made

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        if form is not None and name in self._kept_state:
            return self._kept_state[name][0]
        stored = self._tape.record(tensors, name)
        taped = isinstance(stored, Taped)
        if not taped:
            self.skip.hold(tensors)
        if form is None:
            return stored
        wide = stored.to(torch.float32) if taped else Kept(tensors, form)
        self._kept_state[name] = wide, stored, form
        return wide

    def keep(self, form: Nearest) -> None:
        self._form, tape = form, self._tape
        if form.beside:
            tape.beside = tape.hold(form.beside, "beside")
            tape.lasting.add(tape.beside)
        if form.wide:
            self.params = Taped(tape, buffer=WIDE, owned=False)

    def settle(self, path: str) -> None:
        for name in [name for name in self._kept_state if name.rpartition("/")[0] == path]:
            wide, stored, form = self._kept_state.pop(name)
            if isinstance(wide, Kept):
                wide.settle()
            elif isinstance(wide, Taped) and isinstance(stored, Taped):
                tape, value = self._tape, wide.value
                if tape.nodes[value] != ("to", (("value", stored.value), FLOAT32)):  # it changed
                    assert stored.buffer is not None
                    tape.current[stored.buffer] = rounded(tape, value, form, torch.bfloat16)

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        with self._tape.showing():
            return self.adopt(updated(rule, self.adopt(u), state, _undecided(group)))

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        with self._tape.showing():
            return self.adopt(formula(self.adopt(u).borrow(), state, _undecided(group)))

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        u = self.adopt(u)
        if isinstance(u, Taped) and u.over_(operand(ratio, torch.float64)):
            return u
        factor, divisor = norms.in_two(ratio, u.dtype)
        return u.mul_(operand(factor)).div_(operand(divisor))

    def writable_grads(self) -> TensorList:
        return Taped(self._tape, buffer=GRADIENTS)

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        self.writable_grads().copy_(u)  # of the same list nothing is left to do
        return flowing

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> CompiledSession:
        tape = self._tape
        tape.run()
        params, grads = [tape.buffers[i].tensors for i in (PARAMETERS, GRADIENTS)]
        some = [params[i] for i in where], [grads[i] for i in where]
        return CompiledSession(BucketTape(tape.runner, key, places, *some, tape.family))

    def branch(self) -> CompiledSession:
        return self  # a buffer is spare only where no list of either update lies in it

    def finish(self, u: TensorList, ending: engine.Ending) -> bool:
        return False

    def subtract(self, u: TensorList) -> None:
        u = self.adopt(u)
        if self._form is None:
            Taped(self._tape, buffer=PARAMETERS).sub_(u)
        else:
            u = u if isinstance(u, Taped) else self.adopt(u.clone())
            move(self._tape, self._form, self.params.borrow(), u)
        if isinstance(u, Taped):
            u.forget()

    def close(self) -> None:
        # in the order of the links: that of a set of strings is another one in every process
        for path in dict.fromkeys([name.rpartition("/")[0] for name in self._kept_state]):
            self.settle(path)
        self._tape.end()


def _undecided(group: Group) -> Group:
    """Live values with tensors for floats, so that `update` cannot branch on one that is 0."""
    return {name: _undecided_value(value) for name, value in group.items()}


def _undecided_value(value: Any) -> Any:
    if isinstance(value, tuple) and any([isinstance(x, float) for x in value]):
        return tuple([_undecided_value(float(x) if type(x) is int else x) for x in value])
    if not isinstance(value, float):
        return value
    return torch.tensor(value, dtype=torch.float64, device="cpu")
