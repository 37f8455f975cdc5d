"""Compiled: the engine that records a step, and runs it in as few passes over memory as it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchzero_clip.core.engine import Group, Rule, Session, State, updated
from torchzero_clip.core.norms import statistics
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.stochastic import Rounding
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.tensors import all_plain, same_shapes
from torchzero_clip.engines.buffers import Buffers, apart
from torchzero_clip.engines.compiled.cpp import Call, native
from torchzero_clip.engines.compiled.inductor import in_batches, missing
from torchzero_clip.engines.compiled.program import Launch, Programs
from torchzero_clip.engines.compiled.trace import GRADIENTS, PARAMETERS, Trace, Traced
from torchzero_clip.engines.eager import Eager
from torchzero_clip.engines.kept import Kept, settle
from torchzero_clip.engines.tape import Tape
from torchzero_clip.engines.workspace import Workspaces


class Compiled:
    """The engine that records operators, and runs them in compiled programs.

    Args:
        watch: A context manager that surrounds every launch; `explain` counts bytes with it.
    """

    steady = True
    """Whether a step is repeated whatever its ratios and the strides of gradients are."""
    repeats = math.inf
    """The numbers that a model may have for its steps to be repeated."""
    backend: Literal["native", "torch", "plain"] = "native"
    """The way programs run on CPU: as our own C++, by torch's compiler, or node by node."""

    def __init__(
        self, watch: Callable[[Launch], AbstractContextManager[Any]] | None = None
    ) -> None:
        self.watch = watch
        self.devices: set[str] = set()  # kinds that programs can be compiled for
        self.buffers, self.programs, self.workspaces = Buffers(), Programs(), Workspaces()
        self.eager = Eager(reads=False)  # for tensors that no program takes
        self.tape: Tape | None = None  # of the step that runs, where it is to be repeated

    def check(self, device: torch.device) -> None:
        """Raise a sentence where nothing can compile for this kind of device."""
        kind = device.type
        if kind not in self.devices:
            why = missing(kind)
            if why is not None:
                raise RuntimeError(f"compile=True {why}; leave compile out to step without it")
            self.devices.add(kind)

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        """A session that records; an eager one for complex tensors, subclasses and shared memory.

        Tensors that share memory must be worked on one after the other.
        """
        odd = torch.compiler.is_compiling() or params[0].is_complex()
        if odd or not all_plain([*params, *grads]):
            return self._eagerly(key, places, params, grads)
        self.check(params[0].device)
        _refuse_other_shapes(params, grads)
        trace = Trace(self, key, places, params, grads, [])
        if not apart([trace.buffers[PARAMETERS], trace.buffers[GRADIENTS]]):
            return self._eagerly(key, places, params, grads)
        return CompiledSession(trace)

    def _eagerly(self, *args: Any) -> Session:
        if self.tape is not None:
            self.tape.refuse("some tensors are no program's")
        return self.eager.open(*args)

    def spare(self, key: Hashable, places: Sequence[int], params: Sequence[Tensor]) -> list[Tensor]:
        """Memory like the parameters that is kept under this key."""
        return self.workspaces.like(key, places, params)

    # ------------------------------------------------------------------ running programs

    def run(self, launch: Launch) -> Tensor | None:
        """Run a program; returns the statistics of what it measures, or None where it cannot."""
        if self.watch is None:
            stats = self._run(launch)
        else:
            with self.watch(launch):
                stats = self._run(launch)
        for i in launch.written:  # autograd looks at versions, which programs do not move
            increment_version(launch.buffers[i].tensors)
        return stats

    def _run(self, launch: Launch) -> Tensor | None:
        if self.backend == "plain":
            return self._plainly(launch, range(len(launch.sizes)))
        if (call := self._native(launch)) is not None:
            return self._natively(launch, call)
        if launch.program.stores:
            launch = launch._replace(program=launch.program._replace(measured=None))
            odd = {*launch.misfits(), *[i for i, n in enumerate(launch.sizes) if n < 2]}
            in_batches(launch, [i for i in range(len(launch.sizes)) if i not in odd])
            self._plainly(launch, odd)  # torch would compile those of one number apart
        return None

    def _native(self, launch: Launch) -> Call | None:
        """The program in C++, where there is one."""
        here = self.backend == "native" and launch.program.device.type == "cpu"
        return native(launch.program) if here else None

    def _natively(self, launch: Launch, call: Call) -> Tensor | None:
        odd = launch.misfits()
        sizes = [0 if i in odd else n for i, n in enumerate(launch.sizes)] if odd else launch.sizes
        stats = call(launch, sizes)
        if odd:
            some = self._plainly(launch, odd)
            if stats is not None and some is not None:
                stats[:, odd] = some
        return stats

    def _plainly(self, launch: Launch, some: Iterable[int]) -> Tensor | None:
        """Run a program for these tensors, node by node."""
        values = [launch.plainly(i) for i in some]
        if launch.program.measured is None:
            return None
        m = launch.program.measured[0]
        return statistics([value for value in values if value is not None], m)


FLOAT32 = ("dtype", str(torch.float32))


class CompiledSession:
    """The tensors of one bucket during one step, on one trace."""

    in_two = True  # a step that clips and one that does not share programs

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.params: TensorList = Traced(trace, buffer=PARAMETERS, owned=False)
        self.grads: TensorList = Traced(trace, buffer=GRADIENTS, owned=False)
        self._kept_state: dict[str, tuple[TensorList, TensorList, Rounding]] = {}  # until settled

    @property
    def skip(self) -> Skip:
        return self._trace.skip

    @skip.setter
    def skip(self, skip: Skip) -> None:
        self._trace.skip = skip

    def adopt(self, u: TensorList) -> TensorList:
        if isinstance(u, Traced) and u.on(self._trace):
            return u
        made = self._trace.record(u.tensors, owned=u.owned)
        made.measure = u.measure
        return made

    def state(
        self, name: str, tensors: Sequence[Tensor], rounding: Rounding | None = None
    ) -> TensorList:
        if rounding is not None and name in self._kept_state:
            return self._kept_state[name][0]
        stored = self._trace.record(tensors, name)
        traced = isinstance(stored, Traced)
        if not traced:
            self.skip.hold(tensors)
        if rounding is None:
            return stored
        wide = stored.to(torch.float32) if traced else Kept(tensors, rounding)
        self._kept_state[name] = wide, stored, rounding
        return wide

    def settle(self, path: str) -> None:
        for name in [name for name in self._kept_state if name.rpartition("/")[0] == path]:
            wide, stored, rounding = self._kept_state.pop(name)
            if isinstance(wide, Kept):
                settle([wide])
            elif isinstance(wide, Traced) and isinstance(stored, Traced):
                self._round(wide, stored, rounding)

    def _round(self, wide: Traced, stored: Traced, rounding: Rounding) -> None:
        """Round a list, where it has changed, into the buffer of the stored one."""
        trace, bits, value = self._trace, rounding.bits, wide.value
        if trace.nodes[value] == ("to", (("value", stored.value), FLOAT32)):
            return
        assert stored.buffer is not None
        trace.elements = bits.elements
        vectors = trace.whole(bits.keys), trace.whole(bits.elements.starts)
        operands = (("value", value), *vectors, ("half", rounding.half))
        trace.current[stored.buffer] = trace.node("round", operands, torch.bfloat16)

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        return self.adopt(updated(rule, self.adopt(u), state, _undecided(group)))

    def scale(self, u: TensorList, name: str, x: Operand) -> TensorList:
        u = self.adopt(u)
        return u.mul_(x) if name == "mul" else u.div_(x)

    def writable_grads(self) -> TensorList:
        return Traced(self._trace, buffer=GRADIENTS)

    def write_grads(self, u: TensorList) -> None:
        if not (isinstance(u, Traced) and u.on(self._trace) and u.buffer == GRADIENTS):
            self.writable_grads().copy_(u)

    def workspace(self, besides: TensorList) -> list[Tensor] | None:
        return None

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> CompiledSession:
        trace = self._trace
        if trace.runner.tape is not None:
            trace.runner.tape.refuse("a link sees some of the tensors")
        trace.run()
        params, grads = [trace.buffers[i].tensors for i in (PARAMETERS, GRADIENTS)]
        some = [params[i] for i in where], [grads[i] for i in where]
        return CompiledSession(Trace(trace.runner, key, places, *some, trace.family))

    def branch(self) -> CompiledSession:
        return self  # a buffer is spare only where no list of either update lies in it

    def subtract(self, u: TensorList) -> None:
        u = self.adopt(u)
        if isinstance(u, Traced):
            Traced(self._trace, buffer=PARAMETERS).sub_(u)
            u.forget()
        else:
            self._trace.run()
            torch._foreach_sub_(self._trace.lent(PARAMETERS), u.tensors)

    def close(self) -> None:
        self._trace.end()


def _undecided(group: Group) -> Group:
    """Live values with tensors for floats, so that `update` cannot branch on one that is 0."""
    return {name: _undecided_value(value) for name, value in group.items()}


def _undecided_value(value: Any) -> Any:
    if isinstance(value, tuple) and any([isinstance(x, float) for x in value]):
        return tuple([_undecided_value(float(x) if type(x) is int else x) for x in value])
    if not isinstance(value, float):
        return value
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _refuse_other_shapes(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise before memory is touched where a gradient is of another shape."""
    if same_shapes(grads, params):
        return
    pairs = zip(params, grads, strict=True)
    p, g = next((p, g) for p, g in pairs if p.shape != g.shape)
    raise ValueError(
        f"got a gradient of shape {tuple(g.shape)} for a parameter of {tuple(p.shape)}: set the "
        "gradient to None when you change a parameter"
    )
