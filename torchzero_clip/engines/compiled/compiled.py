"""The compiled engine: it records the operators of rules and runs them as compiled programs.

`Compiled` opens a `CompiledSession` for each bucket of a step. A session does not compute at once.
Its lists of tensors write their operators to a tape, which is a record of pending operators. Later,
one compiled program runs all recorded operators in a single pass over memory. Programs are C++ code
for parameters on CPU and Triton kernels for parameters on a GPU.

`Compiled` also keeps one recorded step. If a new step is similar to the recorded step, `Replays`
runs the recording and does not call the Python code of links and lists.
"""

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
from torchzero_clip.engines.buffers import disjoint
from torchzero_clip.engines.compiled.lists.memory import GRADIENTS, PARAMETERS, WIDE
from torchzero_clip.engines.compiled.lists.runner import Runner
from torchzero_clip.engines.compiled.lists.storage_formats import move, rounded
from torchzero_clip.engines.compiled.lists.tape import BucketTape, Taped
from torchzero_clip.engines.compiled.printers.backends import missing, node_by_node, on_gpu
from torchzero_clip.engines.compiled.printers.launches import KernelError
from torchzero_clip.engines.compiled.printers.operators import over
from torchzero_clip.engines.compiled.replay.captures import StepCapture
from torchzero_clip.engines.compiled.replay.conditions import impure
from torchzero_clip.engines.compiled.replay.replays import Replays
from torchzero_clip.engines.compiled.replay.step_recorder import Refused, StepRecorder
from torchzero_clip.engines.eager import Eager
from torchzero_clip.engines.kept import Kept


class Compiled(Runner):
    """The engine that records operators, compiles them, and replays recorded steps.

    Args:
        links: The links of the chain that the optimizer runs.
    """

    fuses = False

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__()
        self.links = links
        self.replays: Replays | None = None
        self.forgotten = ""  # the call that has dropped the recorded step, such as "state_dict()"
        self.step_capture: StepCapture | None = None  # if `captured` asked for CUDA graphs
        self.devices: set[str] = set()  # device types that `check` has accepted
        self.eager = Eager(reads=False)  # for tensors that programs do not support

    def check(self, device: torch.device) -> None:
        """Raise RuntimeError if programs cannot be compiled for this type of device."""
        if device.type in self.devices:
            return
        if (why := missing(device.type)) is not None:
            raise RuntimeError(f"compile=True {why}. Alternatively, use compile=False")
        if (why := node_by_node(device.type)) is not None:
            warn(f"compile=True {why}")
        self.devices.add(device.type)

    def __repr__(self) -> str:
        return "Compiled()"

    def twin(self, watch: Cover | None = None) -> Compiled:
        """Return an engine that gives the same results, has its own memory and compiles nothing.

        The new engine enters the context manager `watch` each time that it runs a program.
        """
        twin = Compiled(self.links)
        twin.backend = "plain"
        twin.watch = watch
        return twin

    def lasting(self) -> list[Tensor]:
        return self.workspaces.tensors() + self.eager.lasting()

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> engine.Session:
        """Return a session for a bucket. It is eager if programs do not support the tensors.

        Programs support neither complex tensors nor tensor subclasses. Parameters and gradients
        must not share memory, because a program updates all tensors at the same time.
        """
        is_plain = not (torch.compiler.is_compiling() or params[0].is_complex())
        if is_plain and all_here([*params, *grads]):
            self.check(params[0].device)
            tape = BucketTape(self, key, places, params, grads, WeakKeyDictionary())
            if disjoint([tape.buffers[PARAMETERS], tape.buffers[GRADIENTS]]):
                return CompiledSession(tape)
        self._refuse(
            "some parameters or gradients are complex or share memory: use torch.view_as_real, or "
            "clone them"
        )
        return self.eager.open(key, places, params, grads)

    def in_turn(self) -> engine.Engine:
        self._refuse(
            "some gradients share memory: replace these gradients by copies, such as p.grad.clone()"
        )
        return self.eager

    def step(self, step: Step, through: Through) -> Records:
        """Replay the recorded step if this step is similar; otherwise call `through(step)`."""
        if self.replays is None:
            self.replays = Replays(self.links, self.backend, self.step_capture, self.forgotten)
        try:
            return self.replays.step(step, through, self._recording)
        except KernelError as error:
            chain = ", ".join([repr(link.transform) for link in self.links])
            raise RuntimeError(
                f"compile=True: Triton could not compile a kernel of the chain {chain} ({error}); "
                f"install the version of Triton that torch {torch.__version__} requires, or use "
                "compile=False"
            ) from error

    def forget(self, why: str) -> None:
        self.replays = None
        self.forgotten = why

    def phase(self) -> Callable[[], None]:
        """Return a function that restores the recorded step that the engine has now."""
        before = copy.copy(self.replays)

        def restore() -> None:
            self.replays = copy.copy(before)

        return restore

    def capture(self, devices: set[torch.device]) -> None:
        """Capture all later steps in CUDA graphs. Raise ValueError if steps cannot be captured."""
        if len(devices) > 1 or not all([on_gpu(device, self.backend) for device in devices]):
            where = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                "captured: all parameters must be on one GPU, and Triton must be installed, got "
                f"parameters on {where}"
            )
        if why := "; ".join(impure(self.links)):
            raise ValueError(f"captured: this chain cannot be put into a CUDA graph: {why}")
        self.step_capture = StepCapture()
        self.replays = None

    def _refuse(self, why: str) -> None:
        """Raise `Refused` if a step is being recorded now."""
        if self.recorder is not None:
            raise Refused(why)

    def says(self, besides: Sequence[str]) -> list[str]:
        return (self.replays or Replays(self.links, forgotten=self.forgotten)).says(besides)

    @contextmanager
    def _recording(self, grads: Sequence[Tensor]) -> Iterator[StepRecorder]:
        """Record all operations inside of the `with` block as a step with these gradients."""
        self.recorder = recorder = StepRecorder(grads)
        try:
            with recorder:
                yield recorder
        finally:
            self.recorder = None
            recorder.close()


TO_FLOAT32 = ("dtype", str(torch.float32))
"""The operand by which a tape marks a conversion to float32."""


class CompiledSession:
    """The tensors of one bucket during one step. Its lists record their operators on one tape."""

    def __init__(self, tape: BucketTape) -> None:
        self._tape = tape
        self.params: TensorList = Taped(tape, buffer=PARAMETERS, owned=False)
        self.grads: TensorList = Taped(tape, buffer=GRADIENTS, owned=False)
        self._form: Nearest | None = None  # the format that the parameters are stored in
        # by name: the list in float32, the list of stored tensors and their format, until settled
        self._kept_state: dict[str, tuple[TensorList, TensorList, Stochastic]] = {}

    @property
    def skip(self) -> Skip:
        return self._tape.skip

    @skip.setter
    def skip(self, skip: Skip) -> None:
        self._tape.skip = skip

    def adopt(self, u: TensorList) -> TensorList:
        if isinstance(u, Taped) and u.on(self._tape):
            return u
        taped = self._tape.record(u.tensors, owned=u.owned)
        taped.measure = u.measure
        return taped

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
        self._form = form
        tape = self._tape
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
                tape = self._tape
                value = wide.value
                unchanged = tape.nodes[value] == ("to", (("value", stored.value), TO_FLOAT32))
                if not unchanged:
                    assert stored.buffer is not None
                    tape.current[stored.buffer] = rounded(tape, value, form, torch.bfloat16)

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        with self._tape.showing():
            return self.adopt(updated(rule, self.adopt(u), state, _with_tensors(group)))

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        with self._tape.showing():
            return self.adopt(formula(self.adopt(u).borrow(), state, _with_tensors(group)))

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        u = self.adopt(u)
        divisors = operand(ratio, torch.float64)
        if isinstance(u, Taped) and u.over_(divisors):
            return u
        if isinstance(divisors, norms.OfRows) and divisors.fused:
            return u.copy_(TensorList(list(map(over, u.tensors, divisors))))
        factor, divisor = norms.in_two(ratio, u.dtype)
        return u.mul_(operand(factor)).div_(operand(divisor))

    def writable_grads(self) -> TensorList:
        return Taped(self._tape, buffer=GRADIENTS)

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        self.writable_grads().copy_(u)  # records nothing to do if u is the list of gradients
        return flowing

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> CompiledSession:
        tape = self._tape
        tape.run()
        params, grads = [
            [tape.buffers[buffer].tensors[i] for i in where] for buffer in (PARAMETERS, GRADIENTS)
        ]
        return CompiledSession(BucketTape(tape.runner, key, places, params, grads, tape.family))

    def branch(self) -> CompiledSession:
        # both updates may record on one tape: spare memory is reused only after its last list
        return self

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
        # in the order of the links: a set of strings has another order in every process
        for path in dict.fromkeys([name.rpartition("/")[0] for name in self._kept_state]):
            self.settle(path)
        self._tape.end()


def _with_tensors(group: Group) -> Group:
    """Return the hyperparameters of a group with a 0-dim tensor in place of each float.

    A recorded step passes tensors to rules as well. So a rule runs the same operators whether or
    not the step is recorded. In particular, no rule can skip work if a value is 0.0.
    """
    return {name: _with_tensor(value) for name, value in group.items()}


def _with_tensor(value: Any) -> Any:
    """Return a 0-dim tensor for a float, a tuple of tensors for a tuple of floats, else `value`."""
    if isinstance(value, tuple) and any([isinstance(x, float) for x in value]):
        return tuple([_with_tensor(float(x) if type(x) is int else x) for x in value])
    if not isinstance(value, float):
        return value
    return torch.tensor(value, dtype=torch.float64, device="cpu")
