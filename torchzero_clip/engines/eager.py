"""Eager: the default engine. Every link computes its result at once, with operators on lists.

The tail of a chain is an exception. The tail is the links at the end of the chain that can be
computed together, in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.engine import (
    Cover,
    Ending,
    Formula,
    Group,
    Records,
    Rule,
    State,
    Through,
    updated,
)
from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF, state_dtype
from torchzero_clip.core.tensor_kinds import all_plain
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.engines.kept import BATCH, Kept, Wide, updated_in_turn
from torchzero_clip.engines.pieces import in_pieces, pieces
from torchzero_clip.engines.tail import NO_FUSED_END, finish, subtract_, times
from torchzero_clip.engines.workspace import Workspaces


class Eager:
    """The default engine: it runs each operator at once, as torch.optim does.

    Args:
        fuses: Whether the tail of a chain runs in one pass. If False, every link computes its own
            result with its own formula.
        keeps: Whether the engine keeps a workspace between steps.
        reads: Whether the host reads the flag of a guard before the engine writes to memory. If
            False, the engine copies tensors before it writes to them. If the guard skips the step,
            the engine restores the tensors from the copies.
    """

    def __init__(self, fuses: bool = True, keeps: bool = True, reads: bool = True) -> None:
        self.fuses = fuses
        self.keeps = keeps
        self.reads = reads
        self.workspaces = Workspaces()

    def check(self, device: torch.device) -> None:
        """Do nothing, because this engine supports every device."""

    def __repr__(self) -> str:
        options = {"fuses": self.fuses, "keeps": self.keeps, "reads": self.reads}
        return f"Eager({', '.join([f'{name}=False' for name, on in options.items() if not on])})"

    def twin(self, watch: Cover | None = None) -> Eager:
        """Return a new engine with the same options and its own memory. `watch` is not used."""
        return Eager(self.fuses, self.keeps, self.reads)

    def lasting(self) -> list[Tensor]:
        """Return the tensors of the workspaces, which the engine keeps between steps."""
        return self.workspaces.tensors()

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> EagerSession:
        return EagerSession(self, key, places, params, grads)

    def in_turn(self) -> Eager:
        """Return an engine that writes the result of each link before it runs the next link."""
        return Eager(fuses=False, keeps=False, reads=self.reads)

    def step(self, step: Any, through: Through) -> Records:
        return through(step)

    def forget(self, why: str) -> None:
        """Do nothing, because this engine keeps no recorded step."""

    def phase(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, devices: set[torch.device]) -> None:
        raise ValueError("captured: the optimizer must be constructed with compile=True")

    def says(self, besides: Sequence[str]) -> list[str]:
        return []


AT_ONCE = Eager(fuses=False, keeps=False, reads=False)
"""The engine that runs single calls, and steps that torch.compile compiles as a whole."""


class EagerSession:
    """The tensors of one bucket during one step.

    Attributes:
        stored: The parameters in the dtype in which they are stored.
        wide: The parameters in float32, if they are stored in fewer bits.
    """

    skip = Skip()  # the step sets its own

    def __init__(
        self,
        engine: Eager,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        self.params = TensorList(params)
        self.grads = TensorList(grads)
        self.stored = self.params.tensors
        self.wide: Wide | None = None
        self._engine = engine
        self._key = key
        self._places = places
        self._kept_state: dict[str, Kept] = {}  # bfloat16 state in float32, until `settle`
        host = params[0].device.type in small_tensors.HOSTS
        self._keeps = engine.keeps and host
        self._in_pieces = engine.fuses and not host and all_plain(params)
        if params[0].dtype in HALF and host and (engine.fuses or engine.keeps):
            self.wide = Wide(params, Nearest())

    def adopt(self, u: TensorList) -> TensorList:
        if u.owned or not self._keeps:
            return u
        u.workspace = self._buffer
        return u

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        if name in self._kept_state:
            return self._kept_state[name]
        if form is not None:
            guard = partial(self._guard_state, name, tensors) if self.skip else None
            self._kept_state[name] = Kept(tensors, form, guard)
            return self._kept_state[name]
        if self.skip:
            self._guard_state(name, tensors)
        return TensorList(tensors, owned=True)

    def _guard_state(self, name: str, tensors: Sequence[Tensor]) -> None:
        if tensors[0].dim():
            self.guard(f"{name} is written in place", tensors)
        else:  # a scalar is cheaper to copy than to wait for
            self.skip.hold(tensors)

    def keep(self, form: Nearest) -> None:
        self.wide = Wide(self.stored, form)
        if form.wide:
            self.params = self.wide

    def settle(self, path: str) -> None:
        for name in [name for name in self._kept_state if name.rpartition("/")[0] == path]:
            self._kept_state.pop(name).settle()

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        if self._in_pieces and rule.per_entry and not self._kept_state:
            return in_pieces(partial(updated, rule), u, state, group)
        return updated_in_turn(rule, u, state, group)

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        if not self._in_pieces or self._kept_state or u.dtype.is_complex:
            return formula(u.borrow(), state, group)
        return in_pieces(formula, TensorList(u.tensors), state, group)

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        if number and norms.readable(ratio):
            factor = norms.factor_of(ratio, u.dtype)
            return u if factor == 1 else times(u, factor)
        for name, x in norms.divisions(ratio, u.dtype):
            u = u.mul_(operand(x)) if name == "mul" else u.div_(operand(x))
        return u

    def writable_grads(self) -> TensorList:
        self.guard("gradients are written in place", self.grads.tensors)
        return TensorList(self.grads.tensors, owned=True)

    def divide_grads(self, ratio: Tensor) -> None:
        """Divide the gradients in place."""
        self.divide(self.writable_grads(), ratio, lambda x, dtype=None: x.to(dtype).reshape(()))

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        pairs = zip(u.tensors, self.grads.tensors, strict=True)
        if any([new is not old for new, old in pairs]):  # a rule may have written them in place
            self.writable_grads().copy_(u)
        return flowing

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> EagerSession:
        params = [self.stored[i] for i in where]
        grads = [self.grads.tensors[i] for i in where]
        part = EagerSession(self._engine, key, places, params, grads)
        part._keeps = self._keeps  # a part of a branch must not use the workspace either
        return part

    def branch(self) -> EagerSession:
        other = self.select(range(len(self.stored)), self._key, self._places)
        other._keeps = False
        return other

    def finish(self, u: TensorList, ending: Ending) -> bool:
        return self._engine.fuses and finish(self, u, ending)

    def subtract(self, u: TensorList) -> None:
        params = self.stored
        wide = self.wide
        more = [] if wide is None else wide.form.beside
        self.guard(NO_FUSED_END, [*params, *more])
        values = u.tensors
        if wide is None:
            subtract_(params, values, 1.0)
            return
        cuts = wide.cut and all(map(Tensor.is_contiguous, [*params, *values]))
        size = BATCH if params[0].is_cpu else None
        for piece in pieces(params, cuts, size, grows=size is None):
            wide.move(piece, piece.of(values), 1.0, 0.0)

    def close(self) -> None:
        for path in sorted({name.rpartition("/")[0] for name in self._kept_state}):
            self.settle(path)

    def guard(self, why: str, tensors: Sequence[Tensor]) -> None:
        """Make sure that these tensors keep their values if a guard skips the step.

        Args:
            why: The reason for reading the flag of the guard on the host.
            tensors: The tensors that the caller is about to write.
        """
        if self._engine.reads:
            self.skip.read(why)
        else:
            self.skip.hold(tensors)

    def _buffer(self, moving: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
        """Return the workspace of the bucket, or None if it is in use or has another dtype."""
        if dtype != state_dtype(self.stored[0]):
            return None
        workspaces = self._engine.workspaces
        return workspaces.lend(self._key, self._places, self.stored, moving)
