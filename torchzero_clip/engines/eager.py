"""Eager: foreach operators, and torch's fused optimizer where the end of a chain is one.

What a norm rule divides by, a learning rate and a decay are numbers: they wait for the next pass
over memory. An update whose rule has a fused optimizer waits for the end of the chain, where one
kernel does all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.engine import Cover, Formula, Group, Records, Rule, State, Through, updated
from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF, state_dtype
from torchzero_clip.core.tensor_kinds import all_plain
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.engines import pieces
from torchzero_clip.engines.deferred import Guarded, Narrow, Owed, Scaled, overlap, subtract_, times
from torchzero_clip.engines.fused import Fused, numbers_only, takes
from torchzero_clip.engines.kept import BATCH, Kept, Wide, updated_in_turn
from torchzero_clip.engines.workspace import Workspaces


class Eager:
    """The default engine: it puts off factors, rates and decays, and updates that torch has a fused
    optimizer for (the rule's own `update` never runs then), and computes all else at once.

    Args:
        defers: False has every link compute its own result at once, by its own formula.
        keeps: False keeps no workspace from step to step.
        reads: Wait for the flag of a step that may be skipped, where no fused optimizer looks at
            it; False has copies of what is written come back instead.
    """

    def __init__(self, defers: bool = True, keeps: bool = True, reads: bool = True) -> None:
        self.defers, self.keeps, self.reads = defers, keeps, reads
        self.workspaces = Workspaces()

    def check(self, device: torch.device) -> None:
        """Raise nothing: this engine runs on every device."""

    def __repr__(self) -> str:
        options = {"defers": self.defers, "keeps": self.keeps, "reads": self.reads}
        return f"Eager({', '.join([f'{name}=False' for name, on in options.items() if not on])})"

    def twin(self, watch: Cover | None = None) -> Eager:
        """An engine that does the same with memory of its own; its operators are its passes."""
        return Eager(self.defers, self.keeps, self.reads)

    def lasting(self) -> list[Tensor]:
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
        return Eager(defers=False, keeps=False, reads=self.reads)

    def step(self, step: Any, through: Through) -> Records:
        return through(step)

    def forget(self, why: str) -> None:
        """Forget nothing: no step depends on those before."""

    def phase(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, devices: set[torch.device]) -> None:
        raise ValueError("captured takes an optimizer that is made with compile=True")

    def says(self, besides: Sequence[str]) -> list[str]:
        return []


AT_ONCE = Eager(defers=False, keeps=False, reads=False)
"""The engine of a step that torch compiles as a whole, and of single calls."""


class EagerSession:
    """The tensors of one bucket during one step."""

    skip = Skip()  # the step brings its own

    def __init__(
        self,
        engine: Eager,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        self.params, self.grads = TensorList(params), TensorList(grads)
        self._stored, half = list(params), params[0].dtype in HALF
        self._engine, self._key, self._places = engine, key, places
        self._waiting: list[Lazy] = []  # updates that are still to be computed
        self._kept_state: dict[str, Kept] = {}  # until it is settled
        self._defers = self._owes = engine.defers
        host = params[0].device.type in small_tensors.HOSTS
        self._keeps = engine.keeps and host
        self._in_pieces = engine.defers and not host and all_plain(params)
        narrow = half and host and (engine.defers or engine.keeps)
        self._wide = Wide(params, Nearest()) if narrow else None  # in the format that they have
        self._reading: list[Lazy] = []  # lists that are still to read gradients
        self._writable: TensorList | None = None  # gradients that a fused optimizer may divide

    def adopt(self, u: TensorList) -> TensorList:
        if u.owned or not (self._keeps or self._in_pieces) or isinstance(u, Owed):
            return u
        if self._defers and u.dtype in HALF:
            return Narrow(u.tensors, self._widened, self._buffer if self._keeps else None)
        return self._movable(u)

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        if name in self._kept_state:
            return self._kept_state[name]
        guard, waits = partial(self._guard, f"{name} is written at once", tensors), False
        if self.skip:
            if not tensors[0].dim():
                self.skip.hold(tensors)
            elif self._defers:
                waits = True
            else:
                guard()
        if form is not None:
            self._kept_state[name] = Kept(tensors, form, guard if waits else None)
            return self._kept_state[name]
        return Guarded(tensors, guard) if waits else TensorList(tensors, owned=True)

    def keep(self, form: Nearest) -> None:
        self._wide = Wide(self._stored, form)
        self.params = self._wide if form.wide else self.params

    def settle(self, path: str) -> None:
        for name in [name for name in self._kept_state if name.rpartition("/")[0] == path]:
            self._kept_state.pop(name).settle()

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        if not self._defers:
            return updated_in_turn(rule, u, state, group)
        if (factors := rule.affine(group)) is not None:
            scaled = self._affine(u, *factors)
            return updated(rule, u, state, group) if scaled is None else scaled
        kernel, params = rule.fused(group), self._stored if self._wide is None else self._wide
        if kernel is None or not (numbers_only(group) and takes(kernel, params, u, state)):
            if not (self._in_pieces and rule.per_entry) or self._kept_state:
                return updated_in_turn(rule, u, state, group)
            pieces.settle(u, group)
            made = pieces.Updated(u, rule, state, group, self._done)
            (self._waiting if state else self._reading).append(made)
            return made
        self._waiting.append(Fused(u, rule, state, group, self._done, kernel))
        return self._waiting[-1]

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        if not self._in_pieces or self._kept_state or u.dtype.is_complex:
            return formula(u.borrow(), state, group)
        pieces.settle(u, {**group, "u": u})
        self._reading.append(pieces.View(u, formula, state, group, self._done))
        return self._reading[-1]

    def _done(self, u: Lazy) -> None:
        """Forget a list that is computed now."""
        for lists in (self._waiting, self._reading):
            lists[:] = [x for x in lists if x is not u]

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        known = number and norms.readable(ratio)
        if number and u is self._writable and not (known and not 1e-30 < ratio.item() < 1e30):
            mine = TensorList(u.tensors, owned=True)
            debt = [lambda: self.divide(mine, ratio, operand, number)]
            return Owed(mine.tensors, operand(ratio), debt)
        settled = u.owned and not (isinstance(u, pieces.InPieces) and u.pending)
        if known:  # it stays a number, to the end of the chain
            factor = norms.factor_of(ratio, u.dtype)
            if factor == 1:
                return u
            return times(u, factor) if settled or not self._defers else self._scaled(u, factor, 0.0)
        if self._in_pieces and not settled:
            self._reading.append(pieces.Divided(u, operand(ratio)))
            return self._reading[-1]
        for name, x in norms.divisions(ratio, u.dtype):
            u = u.mul_(operand(x)) if name == "mul" else u.div_(operand(x))
        return u

    def writable_grads(self) -> TensorList:
        self._compute_waiting()
        while self._reading:
            _ = self._reading.pop().tensors
        self._guard("gradients are written at once", self.grads.tensors)
        made = TensorList(self.grads.tensors, owned=True)
        self._writable = made if self._owes and made.dtype == torch.float32 else None
        return made

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        flows = type(flowing) is TensorList and not flowing.owned
        if isinstance(u, Owed) and flows and flowing.tensors[0] is u.held[0]:
            self.grads = u
            return u.borrow()
        pairs = zip(u.tensors, self.grads.tensors, strict=True)
        if any([new is not old for new, old in pairs]):
            self.writable_grads().copy_(u)
        return flowing

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> EagerSession:
        params, grads = self._stored, self.grads.tensors
        some = [params[i] for i in where], [grads[i] for i in where]
        other = EagerSession(self._engine, key, places, *some)
        other._keeps, other._owes = self._keeps, False  # a branch's part is a branch
        return other

    def branch(self) -> EagerSession:
        other = self.select(range(len(self.params)), self._key, self._places)
        other._keeps = False
        return other

    def subtract(self, u: TensorList) -> None:
        """w ← (1 - b) w - a u, by torch's fused optimizer where u waits for it."""
        params, wide, source, a, b = self._stored, self._wide, u, 1.0, 0.0
        if isinstance(u, Scaled) and u.pending:
            source, a, b = u.source, u.a, u.b
        if isinstance(source, Fused) and source.pending and (wide is None or not wide.form.whole):
            source.move(params, a, b, self.skip, wide)
            return
        beside = [] if wide is None else wide.form.beside
        self._guard("no fused optimizer is at the end", [*params, *beside])
        late = source if u.dtype == self.params.dtype else u  # what is converted needs memory
        waits = self._in_pieces and isinstance(late, pieces.InPieces) and late.pending
        if waits or wide is not None:
            self._subtract_pieces(u)
        elif u.dtype != self.params.dtype or (b and overlap(params, source.tensors)):
            subtract_(params, u.tensors, 1.0)
        else:
            subtract_(params, source.tensors, a, b)

    def close(self) -> None:
        self._compute_waiting()
        _ = self.grads.tensors
        for path in sorted({name.rpartition("/")[0] for name in self._kept_state}):
            self.settle(path)

    def _guard(self, why: str, tensors: Sequence[Tensor]) -> None:
        """Make sure that these tensors stay as they are in a step that is skipped."""
        if self._engine.reads:
            self.skip.read(why)
        else:
            self.skip.hold(tensors)

    # ------------------------------------------------------------------ deferred updates

    def _compute_waiting(self) -> None:
        while self._waiting:
            _ = self._waiting[0].tensors

    def _buffer(self, moving: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
        """The workspace, for values of this dtype, once no deferred update reads it."""
        if dtype != state_dtype(self._stored[0]):
            return None
        self._compute_waiting()
        workspaces = self._engine.workspaces
        return workspaces.lend(self._key, self._places, self._stored, moving)

    def _affine(self, u: TensorList, a: Any, b: Any) -> TensorList | None:
        """A Scaled list for a · u + b · w; None where a factor is on a device.

        Fused optimizers alone read their learning rate there, without a wait.
        """
        numbers = _number(a), _number(b)
        if numbers[0] is not None and numbers[1] is not None:
            return self._scaled(u, numbers[0], numbers[1])
        waits = numbers[1] == 0 and isinstance(u, Fused) and u.pending
        return self._scaled(u, a, 0.0) if waits else None

    def _scaled(self, u: TensorList, a: Any, b: float) -> Scaled:
        if isinstance(u, Scaled):
            return u.times(a, b)
        return Scaled(u, a, b, self.params, u.dtype, self._movable)

    def _widened(self, u: TensorList, dtype: torch.dtype) -> Scaled:
        return Scaled(u, 1.0, 0.0, self.params, dtype, self._movable)

    def _movable(self, u: TensorList) -> TensorList:
        """A borrowed list that moves to the workspace when it is written."""
        return TensorList(u.tensors, workspace=self._buffer if self._keeps else None)

    # ------------------------------------------------------------------ the last subtraction

    def _subtract_pieces(self, u: TensorList) -> None:
        """w ← w - u, piece by piece."""
        params, wide, a, b = self._stored, self._wide, 1.0, 0.0
        apart = u.dtype == self.params.dtype and (wide is None or wide.form.wide)
        if apart and isinstance(u, Scaled) and u.pending:
            u, a, b = u.apart()
        cuts = pieces.cut(u) and all(map(Tensor.is_contiguous, params))
        most = BATCH if params[0].is_cpu and wide is not None else None
        for piece in pieces.pieces(params, cuts and (wide is None or wide.cut), most, most is None):
            # before the weights move, which they may be of
            values = pieces.piece_of(u, piece).tensors
            if wide is not None:
                wide.move(piece, values, a, b)
                continue
            subtract_(piece.of(params), values, a, b)
            del values  # the next are made in its memory


def _number(x: Any) -> float | None:
    """A number, or the one in a CPU tensor; None for tensors whose device would be waited for."""
    if isinstance(x, (int, float)):
        return x
    readable = isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() == 1
    return x.item() if readable and not x.is_complex() else None
