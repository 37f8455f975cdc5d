"""Eager: foreach operators, and torch's fused optimizer where the end of a chain is one.

What a norm rule divides by, a learning rate and a decay are numbers: they wait for the next pass
over memory. An update whose rule has a fused optimizer waits for the end of the chain, where one
kernel does all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Factors, FusedKernel, Group, Rule, State, updated
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import all_plain, same_shapes, shared_memory
from torchzero_clip.engines.workspace import Workspaces

CHUNK = 2**18  # numbers that are converted at a time


class Eager:
    """The engine that computes at once, or where it saves a pass at the end of the step.

    Args:
        defers: False has every link compute its own result at once, by its own formula.
        keeps: False keeps no workspace from step to step.
    """

    def __init__(self, defers: bool = True, keeps: bool = True) -> None:
        self.defers, self.keeps = defers, keeps
        self.workspaces = Workspaces()

    def check(self, device: torch.device) -> None:
        """Raise nothing: this engine runs on every device."""

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> EagerSession:
        return EagerSession(self, key, places, params, grads)


class EagerSession:
    """The tensors of one bucket during one step."""

    def __init__(
        self,
        engine: Eager,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> None:
        self.params, self.grads = TensorList(params), TensorList(grads)
        self._engine, self._key, self._places = engine, key, places
        self._waiting: list[Fused] = []  # updates that are still to be computed
        self._defers = engine.defers
        self._keeps = engine.keeps and params[0].device.type == "cpu"  # fresh memory is dear there

    def adopt(self, u: TensorList) -> TensorList:
        if u.owned or not self._keeps:
            return u
        return TensorList(u.tensors, workspace=self._kept)

    def state(self, name: str, tensors: Sequence[Tensor]) -> TensorList:
        return TensorList(tensors, owned=True)

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        if self._defers:
            if (scaled := self._affine(u, rule.affine(group))) is not None:
                return scaled
            if (kernel := self._kernel(rule, u, state, group)) is not None:
                self._waiting.append(Fused(self._waiting, kernel, rule, u, state, group))
                return self._waiting[-1]
        return updated(rule, u, state, group)

    def scale(self, u: TensorList, factors: Factors, unchanged: bool) -> TensorList:
        if unchanged:
            return u
        (name, x), *more = factors
        waits = self._defers and name == "mul" and not (more or u.owned)
        if waits and (number := _number(x)) is not None:
            return self._scaled(u, number, 0.0)
        for name, x in factors:
            u = u.mul_(x) if name == "mul" else u.div_(x)
        return u

    def writable_grads(self) -> TensorList:
        self._compute_waiting()
        return TensorList(self.grads.tensors, owned=True)

    def write_grads(self, u: TensorList) -> None:
        pairs = zip(u.tensors, self.grads.tensors, strict=True)
        if any([new is not old for new, old in pairs]):
            self.writable_grads().copy_(u)

    def workspace(self, besides: TensorList) -> list[Tensor] | None:
        kept = self._kept() if self._keeps and besides.owned else None  # others may move there
        if kept is None or any([a is b for a, b in zip(kept, besides.tensors, strict=True)]):
            return None
        return kept

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> EagerSession:
        params, grads = self.params.tensors, self.grads.tensors
        some = [params[i] for i in where], [grads[i] for i in where]
        return EagerSession(self._engine, key, places, *some)

    def branch(self) -> EagerSession:
        other = EagerSession(
            self._engine, self._key, self._places, self.params.tensors, self.grads.tensors
        )
        other._keeps = False
        return other

    def subtract(self, u: TensorList) -> None:
        if isinstance(u, Fused) and u.pending:
            u.move(self.params.tensors, 1.0, 0.0)
        elif isinstance(u, Scaled) and u.pending:
            self._subtract_scaled(u)
        else:
            self._subtract(u.tensors, 1.0)

    def close(self) -> None:
        self._compute_waiting()

    # ------------------------------------------------------------------ deferred updates

    def _compute_waiting(self) -> None:
        while self._waiting:
            _ = self._waiting[0].tensors

    def _kept(self) -> list[Tensor] | None:
        """The workspace of these tensors, once no deferred update reads it."""
        self._compute_waiting()
        return self._engine.workspaces.like(self._key, self._places, self.params.tensors)

    def _affine(self, u: TensorList, factors: tuple[Any, Any] | None) -> TensorList | None:
        """A Scaled list for a · u + b · w; None where a factor is on a device.

        Fused optimizers alone read their learning rate there, without a wait.
        """
        if factors is None:
            return None
        a, b = [_number(x) for x in factors]
        if a is not None and b is not None:
            return self._scaled(u, a, b)
        if b == 0 and isinstance(u, Fused) and u.pending:
            return Scaled(u, factors[0], 0.0, self.params, self.adopt)
        return None

    def _scaled(self, u: TensorList, a: float, b: float) -> TensorList:
        if isinstance(u, Scaled) and u.pending and not isinstance(u.a, Tensor):
            return Scaled(u.source, a * u.a, a * u.b + b, self.params, self.adopt)
        return Scaled(u, a, b, self.params, self.adopt)

    def _kernel(self, rule: Rule, u: TensorList, state: State, group: Group) -> FusedKernel | None:
        """The rule's fused optimizer, where it takes these tensors and numbers."""
        kernel = rule.fused(group)
        if kernel is None or not _numbers_only(group):
            return None
        params = self.params.tensors
        lists = [u.tensors, *[state[name].tensors for name in kernel.state if name in state]]
        fits = params[0].device.type in kernel.devices and all(
            [same_shapes(some, params) or not any(map(Tensor.dim, some)) for some in lists]
        )
        dtypes = {t.dtype for some in (params, *lists) for t in some}
        fits = fits and dtypes in ({torch.float32}, {torch.float64})
        plain = [
            all_plain(some) and all(map(Tensor.is_contiguous, some)) for some in (params, *lists)
        ]
        return kernel if fits and all(plain) else None

    # ------------------------------------------------------------------ the last subtraction

    def _subtract_scaled(self, u: Scaled) -> None:
        """w ← (1 - b) w - a u, with torch's fused optimizer where u waits for it."""
        params, source = self.params.tensors, u.source
        if isinstance(source, Fused) and source.pending:
            source.move(params, u.a, u.b)
            return
        rounds_once = u.dtype == self.params.dtype and (1e-30 < abs(u.a) < 1e30 or u.a == 0)
        if not rounds_once or (u.b and _share_memory(params, source.tensors)):
            self._subtract(u.tensors, 1.0)
            return
        if u.b:
            torch._foreach_mul_(params, 1 - u.b)
        self._subtract(source.tensors, u.a)

    def _subtract(self, values: Sequence[Tensor], a: float) -> None:
        """w ← w - a u; half precision in parts, since torch makes float32 copies of both."""
        params = self.params.tensors
        if params[0].dtype == values[0].dtype or not self._keeps:
            torch._foreach_sub_(params, list(values), alpha=a)
            return
        for p, u in zip(params, values, strict=True):
            if p.numel() > CHUNK and p.is_contiguous() and u.is_contiguous():
                rows = zip(p.view(-1).split(CHUNK), u.view(-1).split(CHUNK), strict=True)
                for some, change in rows:
                    some.sub_(change, alpha=a)
            else:
                p.sub_(u, alpha=a)


class Scaled(Lazy):
    """a · source + b · parameters."""

    __slots__ = ("_adopt", "_params", "a", "b", "source")

    def __init__(
        self,
        source: TensorList,
        a: Any,
        b: float,
        params: TensorList,
        adopt: Callable[[TensorList], TensorList],
    ) -> None:
        super().__init__()
        self.source, self.a, self.b, self._params, self._adopt = source, a, b, params, adopt

    def __len__(self) -> int:
        return len(self.source)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def compute(self) -> list[Tensor]:
        source = self.source
        u = source if source.owned else self._adopt(source.borrow())
        u = u.mul_(self.a) if isinstance(self.a, Tensor) or self.a != 1 else u.own()
        return u.add_(self._params, alpha=self.b).tensors if self.b else u.tensors


class Fused(Lazy):
    """A deferred update of a rule that torch has a fused optimizer for."""

    __slots__ = ("_group", "_kernel", "_rule", "_state", "_u", "_waiting")

    def __init__(
        self,
        waiting: list[Fused],
        kernel: FusedKernel,
        rule: Rule,
        u: TensorList,
        state: State,
        group: Group,
    ) -> None:
        super().__init__()
        self._waiting, self._kernel, self._rule = waiting, kernel, rule
        self._u, self._state, self._group = u, state, group

    def __len__(self) -> int:
        return len(self._u)

    @property
    def dtype(self) -> torch.dtype:
        return self._u.dtype

    def compute(self) -> list[Tensor]:
        self._waiting.remove(self)  # to compute it may ask for the workspace that it reads
        return updated(self._rule, self._u, self._state, self._group).own().tensors

    def move(self, params: list[Tensor], a: Any, b: float) -> None:
        """w ← (1 - b) w - a u, by the fused optimizer."""
        kernel, decays = self._kernel, bool(self._kernel.decays and b and a != 0)
        if b and not decays and _share_memory(params, self._u.tensors):
            self._u = self._u.clone()
        if b and not decays:
            torch._foreach_mul_(params, 1 - b)
        kernel.advance(self._state)
        lists = [_listed(self._state, name) for name in kernel.state]
        decay = b / a if decays else 0.0
        kernel.function(params, self._u.tensors, *lists, lr=a, weight_decay=decay)
        self._waiting.remove(self)
        self.tensors = []  # it is used up


def _listed(state: State, name: str) -> list[Tensor]:
    """State as kernels take it: of counts that are equal and share a vector the first for all."""
    tensors = state[name].tensors if name in state else []
    vector = shared_memory(tensors) if tensors and not tensors[0].dim() else None
    if vector is not None and vector.device.type == "cpu" and bool((vector == vector[0]).all()):
        return [tensors[0]] * len(tensors)
    return tensors


def _share_memory(params: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether the values to subtract lie in the memory of the parameters."""
    if not all_plain(params):
        return False
    storages = {p.untyped_storage().data_ptr() for p in params}
    return not storages.isdisjoint([u.untyped_storage().data_ptr() for u in values])


def _number(x: Any) -> float | None:
    """A number, or the one in a CPU tensor; None for tensors whose device would be waited for."""
    if isinstance(x, (int, float)):
        return x
    readable = isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() == 1
    return x.item() if readable and not x.is_complex() else None


def _numbers_only(group: Group) -> bool:
    """Whether no live value is a tensor, since kernels take numbers."""
    values = [x for x in group.values() if not isinstance(x, TensorList)]
    flat = [
        x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    return not any([isinstance(x, Tensor) for x in flat])
